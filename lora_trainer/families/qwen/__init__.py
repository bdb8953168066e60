"""The family of Qwen-Image, and of what is made from it."""
