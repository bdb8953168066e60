"""The frozen base: quantising, checkpointing, block swap, compiling."""
