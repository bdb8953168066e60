"""The page Compare: the samples of two trainings side by side."""
