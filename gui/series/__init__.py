"""The page of several trainings that differ by some settings: a series, or the trials of a study of `tune`."""
