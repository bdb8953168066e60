"""Errors after which a process cannot use its device any more, told from those of one computation."""

from __future__ import annotations

from lora_trainer.device_calls import started_device, synchronize

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
