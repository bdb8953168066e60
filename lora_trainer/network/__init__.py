"""What is done to the frozen base: quantising, checkpointing, block swap, compiling, CUDA graphs."""
