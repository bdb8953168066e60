"""The first day with a GPU in one command: slices of at most ten minutes that go on where they stopped."""
