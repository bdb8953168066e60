"""The page Datasets: the images of a folder with their captions and masks, edited in place."""
