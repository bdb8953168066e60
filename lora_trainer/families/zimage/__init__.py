"""The family of Z-Image, and of what is made from it."""
