"""The page Train: from a folder of images to a running training in three clicks."""
