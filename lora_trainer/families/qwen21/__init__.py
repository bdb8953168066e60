"""The family of Qwen-Image 2.1, and of what is made from it."""
