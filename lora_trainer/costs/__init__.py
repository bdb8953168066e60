"""What one sample costs: bytes and FLOPs by formula, without torch."""
