"""Errors, events, files, randomness and words, for every room; nothing of training."""
