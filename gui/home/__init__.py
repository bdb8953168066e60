"""The page Home: every training as a card; before the first one the example."""
