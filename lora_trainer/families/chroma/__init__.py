"""The family of Chroma, and of what is made from it."""
