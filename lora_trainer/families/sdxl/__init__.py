"""The family of Stable Diffusion XL, and of what is made from it."""
