"""The family of Stable Diffusion 2.x, and of what is made from it."""
