"""The cost of one sample: bytes and FLOPs by formula, without torch."""
