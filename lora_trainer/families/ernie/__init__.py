"""The family of ERNIE-Image, and of what is made from it."""
