"""The family of Anima, and of what is made from it."""
