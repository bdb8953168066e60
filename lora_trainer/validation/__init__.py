"""What a trained adapter is worth: measured parts in [0, 1] and a score from them (docs/scores.md)."""
