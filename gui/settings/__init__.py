"""The page All settings: every setting of a draft, with what is in force and where it comes from."""
