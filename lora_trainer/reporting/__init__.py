"""What a run says of itself: status, console, trackers, history, report."""
