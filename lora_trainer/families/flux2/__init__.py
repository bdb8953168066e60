"""The family of FLUX.2, and of what is made from it."""
