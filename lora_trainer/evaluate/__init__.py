"""The score of a finished LoRA and its measured parts (docs/scores.md)."""
