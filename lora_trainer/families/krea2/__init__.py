"""The family of Krea 2, and of what is made from it."""
