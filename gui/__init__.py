"""The graphical interface, installed as `lora_trainer.gui`; nothing of lora_trainer imports it."""
