"""A run's status, console, trackers, history and report."""
