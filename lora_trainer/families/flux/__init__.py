"""The family of FLUX.1, and of what is made from it."""
