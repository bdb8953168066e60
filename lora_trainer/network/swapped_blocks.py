"""Which blocks of a base are streamed and what that leaves on the device. Torch-free.

The memory plan and the network ask the same functions, so that a predicted byte is a stored byte.
`network/block_swap.py` does what is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

BUFFERS = 2
"""Streamed blocks on the device at a time: that at work and the next on its way."""


def streamed_indices(total: int, count: int) -> tuple[int, ...]:
    """Return which `count` of `total` repeated blocks are streamed, evenly spread.

    A copy hides behind the computation between two streamed blocks; the widest even gap hides most.
    """
    return tuple((2 * place + 1) * total // (2 * count) for place in range(count))


def moved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return what `count` streamed blocks take in host memory, and what a pass copies at most."""
    return sum(block_bytes[index] for index in streamed_indices(len(block_bytes), count))


def saved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the device memory that `count` streamed blocks set free, net of their buffers.

    Below 0 where the buffers, each as large as the largest of them, take more than they replace.
    """
    chosen = [block_bytes[index] for index in streamed_indices(len(block_bytes), count)]
    return sum(chosen) - min(BUFFERS, count) * max(chosen, default=0)
