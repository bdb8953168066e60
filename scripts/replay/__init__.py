"""A plan's allocations, replayed through a model of PyTorch's allocator: the figures of `allocator_table`."""
