"""Preset settings as data: one JSON file per model family, and schema.json that they follow."""
