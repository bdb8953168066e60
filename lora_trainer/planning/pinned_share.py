"""How much of the host memory that is copied to the GPU can be pinned. No torch.

Input is a load and the bytes that the platform lets a process pin; output the pinned share of each kind.
Unpinned memory is copied more slowly, and a step waits for each copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.torch_allocator import RESERVED_BYTES
from lora_trainer.planning.loads import Load, RememberedCosts


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Pinned shares, 0 to 1, of streamed blocks and offloaded inputs."""

    streamed: float = 1.0
    offloaded: float = 1.0


def pinned_shares(
    load: Load, *, facts: BaseFacts, costs: RememberedCosts, pinnable_bytes: int | None
) -> Pinned:
    """Return the pinned shares of a load where a process may pin this many bytes; None: no limit.

    Blocks are pinned first: they are pinned once, before the first step, and inputs as they come.
    """
    if pinnable_bytes is None:
        return Pinned()
    base = costs.frozen_base(facts, load)
    remaining_bytes = max(0, pinnable_bytes - RESERVED_BYTES)
    shares = []
    for size in (
        base.streamed_bytes(load.streamed_blocks),
        offloaded_bytes(load, facts=facts, costs=costs),
    ):
        pinned_size = min(remaining_bytes, size)
        shares.append(pinned_size / size if size else 1.0)
        remaining_bytes -= pinned_size
    streamed, offloaded = shares
    return Pinned(streamed=streamed, offloaded=offloaded)


PINNED_AT_MOST = 2
"""Torch rounds pinned memory up to powers of two; a plan knows only the sum of the inputs, so: twice."""


def offloaded_bytes(load: Load, *, facts: BaseFacts, costs: RememberedCosts) -> int:
    """Return the most bytes that inputs of recomputed blocks can take in host memory."""
    return PINNED_AT_MOST * load.micro_batch * costs.sample_cost(facts, load.workload()).host_bytes
