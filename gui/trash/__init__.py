"""The page Trash, and deleting with Undo on every page."""
