"""What all families share: the interface, facts, text encoders, latents, sampling."""
