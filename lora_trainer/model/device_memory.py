"""Memory in use as it is measured: the allocator's and the driver's view of a card, and the process.

Input is a torch device, output bytes. On a CPU the device's memory is the process's own, so the card's
figures are 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil
import torch

from lora_trainer.device_calls import free_and_total_bytes, peak_bytes, tensor_bytes


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
