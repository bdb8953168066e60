"""Latents, VAEs and samples, as families share them."""
