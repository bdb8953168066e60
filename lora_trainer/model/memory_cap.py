"""An upper bound on what PyTorch's allocator takes of a card, so that it can be shared.

Where a driver moves memory to the host instead of refusing it (Windows, and Linux under it), a full
card is not an error but a run ten times slower: there the bound is always set.
"""

from __future__ import annotations

import torch

from lora_trainer.device_calls import bound_allocator, kind_of, total_bytes
from lora_trainer.hardware import driver_spills, spill_margin_bytes


def cap_allocator(*, limit_bytes: int | None, free_bytes: int, device: torch.device) -> int | None:
    """Bound the allocator of a GPU; return the bytes it may have, None: no bound was needed.

    `limit_bytes` is what the whole process may take, context included; `free_bytes` what is free.
    """
    spills = driver_spills()
    if limit_bytes is None and not spills:
        return None
    total = total_bytes(device)
    if spills:
        room_bytes = free_bytes - spill_margin_bytes(total)
        limit_bytes = room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)
    assert limit_bytes is not None
    runtime_bytes = kind_of(device).runtime_bytes
    return bound_allocator(device, allowed_bytes=max(limit_bytes - runtime_bytes, 0))
