"""One training put together: prepare, build, train, save, follow, stop."""
