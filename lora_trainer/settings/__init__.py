"""All settings: how one is declared, the sections, the model of all of them. Read through config.py."""
