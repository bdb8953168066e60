"""Giving a LoRA away: the dialogs that copy it into another program's folder and publish it, on any page."""
