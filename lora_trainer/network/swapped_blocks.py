"""Which blocks of a base are streamed, and the memory this saves. Torch-free.

The memory plan and the network use the same functions, so that predictions match the real bytes.
`network/block_swap.py` does the streaming.
"""

from __future__ import annotations

from collections.abc import Sequence

BUFFERS = 2
"""Streamed blocks on the device at a time: one computes while the next one is copied."""


def streamed_indices(total: int, count: int) -> tuple[int, ...]:
    """Return the indices of `count` streamed blocks among `total` repeated ones, evenly spread.

    A copy hides behind the computation between two streamed blocks, so the gaps should be equally wide.
    """
    return tuple((2 * index + 1) * total // (2 * count) for index in range(count))


def moved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the host memory of `count` streamed blocks, which is also the most that a pass copies."""
    return sum(block_bytes[index] for index in streamed_indices(len(block_bytes), count))


def saved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the device memory that `count` streamed blocks free, net of their buffers.

    Below 0 where the buffers, each as large as the largest streamed block, take more than they replace.
    """
    chosen = [block_bytes[index] for index in streamed_indices(len(block_bytes), count)]
    return sum(chosen) - min(BUFFERS, count) * max(chosen, default=0)
