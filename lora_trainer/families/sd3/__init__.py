"""The family of Stable Diffusion 3 and 3.5, and of what is made from it."""
