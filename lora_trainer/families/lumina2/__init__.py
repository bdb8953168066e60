"""The family of Lumina-Image 2.0, and of what is made from it."""
