"""What a run leaves behind: exported adapters, resume states, samples, trackers, the report."""
