"""Captions written by models, and the way back from them."""
