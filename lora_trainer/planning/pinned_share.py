"""How much of what waits for a card in host memory is pinned, in the order in which it is. No torch.

Input is what waits, and what the platform lets a process pin; output the share of each that is pinned.
The others are copied more slowly, and a step waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.torch_allocator import RESERVED_BYTES
from lora_trainer.planning.loads import Load, RememberedCosts


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Shares from 0 to 1: of streamed blocks, offloaded inputs and modulation layers."""

    streamed: float = 1.0
    offloaded: float = 1.0
    modulation: float = 1.0


def pinned_shares(
    load: Load, *, facts: BaseFacts, costs: RememberedCosts, pinnable_bytes: int | None
) -> Pinned:
    """Return what is pinned of a load where a process may pin this much; None: all of it.

    What is copied in every step comes before what is copied once for many samples.
    """
    if pinnable_bytes is None:
        return Pinned()
    base = costs.frozen_base(facts, load)
    left = max(0, pinnable_bytes - RESERVED_BYTES)
    shares = []
    for size in (
        base.streamed_bytes(load.streamed_blocks),
        offloaded_bytes(load, facts=facts, costs=costs),
        base.away_bytes,
    ):
        taken = min(left, size)
        shares.append(taken / size if size else 1.0)
        left -= taken
    streamed, offloaded, modulation = shares
    return Pinned(streamed=streamed, offloaded=offloaded, modulation=modulation)


PINNED_AT_MOST = 2
"""Torch takes powers of two for pinned memory; of inputs only the sum is known, not each one's size."""


def offloaded_bytes(load: Load, *, facts: BaseFacts, costs: RememberedCosts) -> int:
    """Return what the inputs of recomputed blocks take in host memory, at most."""
    return PINNED_AT_MOST * load.micro_batch * costs.sample_cost(facts, load.workload()).host_bytes
