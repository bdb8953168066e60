"""Memory in use as it is measured: the allocator's and the driver's view of a card, and the process.

Input is a torch device, output bytes. On a CPU the device's memory is the process's own, so the card's
figures are 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil
import torch


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one moment, as a step line of events.jsonl has them.

    `vram_bytes` and `vram_reserved_bytes` are the highest so far, of tensors and of what the allocator
    holds for them; `vram_used_bytes` is the whole card now, other programs and the CUDA context
    included; `host_bytes` is the process's resident memory now.
    """

    vram_bytes: int
    vram_reserved_bytes: int
    vram_used_bytes: int
    host_bytes: int

    def fields(self) -> dict[str, int]:
        """Return the figures by name, for an event."""
        return asdict(self)


def device_memory(device: torch.device) -> DeviceMemory:
    """Measure now; takes microseconds and waits for no kernel."""
    host_bytes = int(psutil.Process().memory_info().rss)
    if device.type != "cuda":
        return DeviceMemory(
            vram_bytes=0, vram_reserved_bytes=0, vram_used_bytes=0, host_bytes=host_bytes
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        vram_bytes=torch.cuda.max_memory_allocated(device),
        vram_reserved_bytes=torch.cuda.max_memory_reserved(device),
        vram_used_bytes=total_bytes - free_bytes,
        host_bytes=host_bytes,
    )
