"""The frozen base: quantising, checkpointing, block swap, compiling, CUDA graphs."""
