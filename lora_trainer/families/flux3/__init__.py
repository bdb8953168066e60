"""The family of FLUX.3 Klein, and of what is made from it."""
