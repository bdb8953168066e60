"""What pinned host memory takes, which planning counts and the one place that pins asks for. No torch."""

from __future__ import annotations

PAGE_BYTES = 4096
RESERVED_BYTES = 64 * 2**20
"""Of what may be pinned, left for batches and read-backs, which are copied in every step and are small."""


def pinned_bytes(size: int) -> int:
    """Return what torch takes for pinned memory of `size` bytes: the next power of two."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())
