"""A device that ran out of memory or broke: recognising it, measuring memory, giving it back.

Recognising that a device ran out of memory, and giving back what can be given back.

Memory in use as it is measured: the allocator's and the driver's view of a card, and the process.

Input is a torch device, output bytes. On a CPU the device's memory is the process's own, so the card's
figures are 0.

Errors after which a process cannot use its device any more, told from those of one computation.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from lora_trainer.hardware.device_calls import (
    free_and_total_bytes,
    peak_bytes,
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


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one moment, as a step line of events.jsonl has them.

    `vram_bytes` and `vram_reserved_bytes` are the highest so far, of tensors and of what the allocator
    holds for them; `vram_used_bytes` is the whole card now, other programs and the CUDA context
    included; `vram_now_bytes` is what tensors have of it now; `host_bytes` is the process's resident
    memory now, `host_own_bytes` of it what is no file, which the system may take back.
    """

    vram_bytes: int
    vram_reserved_bytes: int
    vram_used_bytes: int
    vram_now_bytes: int
    host_bytes: int
    host_own_bytes: int

    def fields(self) -> dict[str, int]:
        """Return the figures by name, for an event."""
        return asdict(self)


def device_memory(device: torch.device) -> DeviceMemory:
    """Measure now; takes microseconds and waits for no kernel."""
    memory = psutil.Process().memory_info()
    host_bytes = int(memory.rss)
    # Linux counts files that are mapped, such as a base's, as shared; Windows has the rest ready.
    own_bytes = int(getattr(memory, "private", host_bytes - getattr(memory, "shared", 0)))
    if device.type == "cpu":
        return DeviceMemory(
            vram_bytes=0,
            vram_reserved_bytes=0,
            vram_used_bytes=0,
            vram_now_bytes=0,
            host_bytes=host_bytes,
            host_own_bytes=own_bytes,
        )
    free_bytes, total_bytes = free_and_total_bytes(device)
    allocated_bytes, reserved_bytes = peak_bytes(device)
    return DeviceMemory(
        vram_bytes=allocated_bytes,
        vram_reserved_bytes=reserved_bytes,
        vram_used_bytes=total_bytes - free_bytes,
        vram_now_bytes=tensor_bytes(device),
        host_bytes=host_bytes,
        host_own_bytes=own_bytes,
    )


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
"""What CUDA and HIP say when every later call of the process will fail too (CUDA Runtime API, cudaError_t:
"the process must be terminated and relaunched")."""


def is_lost(error: BaseException) -> bool:
    """Say whether the device of this process is lost, so that only a new process can go on."""
    text = str(error)
    if any(message in text for message in _LOST):
        return True
    device = started_device() if isinstance(error, RuntimeError) else None
    if device is None:
        return False
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False
