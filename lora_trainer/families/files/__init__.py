"""Bases as files: where they lie, on disk and on the Hub, what they are, how their weights are read."""
