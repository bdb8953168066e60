"""What a finished LoRA is worth: measured parts and a score (docs/scores.md)."""
