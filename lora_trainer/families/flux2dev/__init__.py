"""The family of FLUX.2 dev, and of what is made from it."""
