"""The page LoRAs: all finished adapters, and everything about one file."""
