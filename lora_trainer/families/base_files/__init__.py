"""Where files keep a base's weights: folders and single files."""
