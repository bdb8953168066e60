"""The page of one run: what it does, its samples, its loss, its log, settings and files."""
