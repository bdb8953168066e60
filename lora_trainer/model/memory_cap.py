"""An upper bound on what PyTorch's allocator takes of a card, so that it can be shared.

Where a driver moves memory to the host instead of refusing it (Windows, and Linux under it), a full
card is not an error but a run ten times slower: there the bound is always set.
"""

from __future__ import annotations

import torch

from lora_trainer.hardware import SPILL_MARGIN_BYTES, driver_spills
from lora_trainer.planning.memory import RUNTIME_BYTES


def cap_allocator(*, limit_bytes: int | None, free_bytes: int, device: torch.device) -> int | None:
    """Bound the allocator of a CUDA device; return the bytes it may have, None: no bound was needed.

    `limit_bytes` is what the whole process may take, context included; `free_bytes` what is free.
    """
    if driver_spills():
        room_bytes = free_bytes - SPILL_MARGIN_BYTES
        limit_bytes = room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)
    if limit_bytes is None:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = min(total, max(limit_bytes - RUNTIME_BYTES["cuda"], 0))
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    return allowed
