"""The family of Ideogram 4, and of what is made from it."""
