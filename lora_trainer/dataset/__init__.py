"""From a folder of images to checked records; no torch."""
