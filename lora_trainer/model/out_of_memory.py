"""Recognising that a device ran out of memory, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from lora_trainer.device_calls import free_and_total_bytes

_SAYING_SO = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_ON_A_FULL_CARD = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
)
"""What cuBLAS and cuDNN say without room for a workspace, but also for other reasons."""
NEARLY_FULL_BYTES = 256 * 2**20
"""Less than this free on a card leaves no room for a context or a workspace of theirs."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """accelerate knows the allocators' messages; CUDA, cuBLAS and cuDNN have others."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or bool(should_reduce_batch_size(error))
        or any(message in text for message in _SAYING_SO)
        or (any(message in text for message in _ON_A_FULL_CARD) and _nearly_full())
    )


def free_memory() -> None:
    """Collect garbage and empty the allocator's cache.

    Call it outside the `except` block: the traceback keeps the tensors alive that must go.
    """
    gc.collect()
    clear_device_cache(garbage_collection=False)


def _nearly_full() -> bool:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return False
    try:
        free_bytes, _ = free_and_total_bytes(device)
    except RuntimeError:  # a card that cannot say so did not merely run out of memory
        return False
    return free_bytes < NEARLY_FULL_BYTES
