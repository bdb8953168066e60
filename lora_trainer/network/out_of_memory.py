"""A device that ran out of memory or broke: recognising it, measuring memory, giving it back.

A CPU has no memory besides the process's, so the figures of a GPU are 0 for it.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from lora_trainer.common.processes import give_back_heap
from lora_trainer.hardware.device_calls import (
    free_and_total_bytes,
    started_device,
    synchronize,
    tensor_bytes,
)

_SAYING_SO = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# Messages of cuBLAS and cuDNN when a workspace does not fit, but also in other cases: they count as out of
# memory only if the GPU is nearly full.
_ON_A_FULL_CARD = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
)
# With less free memory a context or a workspace of these libraries does not fit.
NEARLY_FULL_BYTES = 256 * 2**20


def is_out_of_memory(error: RuntimeError) -> bool:
    """Say whether an error means that a device, or the host, ran out of memory.

    accelerate recognises the messages of the allocators; CUDA, cuBLAS and cuDNN have others.
    """
    text = str(error)
    # Kernels' libraries answer a full GPU with errors of their own, which mean another fault on one that is not full.
    if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return True
    if any(message in text for message in _SAYING_SO):
        return True
    if not any(message in text for message in _ON_A_FULL_CARD):
        return False
    device = torch.accelerator.current_accelerator(check_available=True)
    try:
        return device is not None and free_and_total_bytes(device)[0] < NEARLY_FULL_BYTES
    except RuntimeError:  # a GPU that cannot answer has a worse fault than lack of memory
        return False


def free_memory() -> None:
    """Collect garbage and empty the allocators' caches, the C library's too.

    Call it outside the `except` block: inside, the traceback keeps the tensors of the failed step alive.
    """
    gc.collect()
    clear_device_cache(garbage_collection=False)
    give_back_heap()


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory in use, by the names of the event `Step`, which explains them."""

    vram_bytes: int
    vram_reserved_bytes: int
    vram_used_bytes: int
    vram_now_bytes: int
    host_bytes: int
    host_own_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Measure the memory now; waits for no kernel."""
    memory = psutil.Process().memory_info()
    allocated = reserved = used = tensors = 0
    if device.type != "cpu":
        free_bytes, total_bytes = free_and_total_bytes(device)
        tensors, allocated, reserved = tensor_bytes(device)
        used = total_bytes - free_bytes
    # Linux counts mapped files, such as a base's, as shared. Windows reports the private bytes.
    own = getattr(memory, "private", memory.rss - getattr(memory, "shared", 0))
    return DeviceMemory(
        vram_bytes=allocated,
        vram_reserved_bytes=reserved,
        vram_used_bytes=used,
        vram_now_bytes=tensors,
        host_bytes=int(memory.rss),
        host_own_bytes=int(own),
    )


# Messages of CUDA and HIP for errors after which every later call of the process fails too (CUDA Runtime API,
# cudaError_t: "the process must be terminated and relaunched").
_LOST = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "invalid program counter",
    "misaligned address",
    "unspecified launch failure",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ECC error",
    "GPU has fallen off the bus",
)


def is_lost(error: BaseException) -> bool:
    """Say whether the device of this process is lost, so that only a new process can continue."""
    text = str(error)
    if any(message in text for message in _LOST):
        return True
    # An unknown message: a lost device fails at the next call as well, an intact one does not.
    try:
        if isinstance(error, RuntimeError) and (device := started_device()) is not None:
            synchronize(device)
    except RuntimeError:
        return True
    return False
