"""LoRA files, ours and others': names, headers, reading, writing, metadata, verification."""
