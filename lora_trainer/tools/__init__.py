"""Commands on finished LoRA files: convert, merge, resize, extract, describe."""
