"""Recognising that a device ran out of memory, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def is_out_of_memory(error: RuntimeError) -> bool:
    """accelerate knows the allocators' messages; the CUDA runtime and cuBLAS have others."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or bool(should_reduce_batch_size(error))
        or "CUDA error: out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def free_memory() -> None:
    """Collect garbage and empty the allocator's cache.

    Call it outside the `except` block: the traceback keeps the tensors alive that must go.
    """
    gc.collect()
    clear_device_cache(garbage_collection=False)
