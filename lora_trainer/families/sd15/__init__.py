"""The family of Stable Diffusion 1.x, and of what is made from it."""
