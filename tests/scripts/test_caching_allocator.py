"""The model of PyTorch's allocator: its published rules, and what must hold for any sequence of tensors.

Expected figures follow from the constants and comments in c10/cuda/CUDACachingAllocator.cpp; whole plans are replayed
in test_allocator_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.replay.caching_allocator import (
    MIB,
    Block,
    CachingAllocator,
    OutOfMemory,
)

KIB = 1024
GIB = 1024 * MIB
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 24 * MIB),
    st.integers(1, 600 * MIB),
)
OPERATIONS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60)


@pytest.mark.parametrize(
    ("expandable", "sizes", "allocated", "reserved"),
    [
        (False, [513, MIB], KIB + MIB, 2 * MIB),
        (False, [MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        (False, [MIB + 1], MIB + 512, 20 * MIB),
        (False, [11 * MIB], 12 * MIB, 12 * MIB),  # what is left is not split off up to 1 MiB
        (False, [int(10.9 * MIB)], int(10.9 * MIB) // 512 * 512 + 512, 12 * MIB),
        (True, [MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        (True, [11 * MIB, 11 * MIB], 22 * MIB, 40 * MIB),
        (True, [72 * MIB, 72 * MIB], 144 * MIB, 160 * MIB),
    ],
)
def test_segments_or_pages_for_each_request(
    expandable: bool, sizes: list[int], allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


@pytest.mark.parametrize("expandable", [False, True])
def test_caches_are_given_back_before_a_request_fails(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable, limit_bytes=200 * MIB)
    first, second = allocator.allocate(100 * MIB), allocator.allocate(60 * MIB)
    allocator.free(first)
    allocator.allocate(120 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 180 * MIB)
    with pytest.raises(OutOfMemory, match="180 MiB|188,743,680"):
        allocator.allocate(60 * MIB)
    allocator.free(second)
    assert allocator.allocate(60 * MIB).size == 60 * MIB


def test_a_segment_in_use_anywhere_is_not_given_back_but_its_pages_are() -> None:
    for expandable, left in ((False, 120 * MIB), (True, 20 * MIB)):
        allocator = CachingAllocator(expandable=expandable)
        whole = allocator.allocate(120 * MIB)
        allocator.free(whole)
        allocator.allocate(2 * MIB)
        allocator.release()
        assert allocator.reserved_bytes == left


def run(
    operations: Sequence[tuple[bool, int, int]], allocator: CachingAllocator
) -> tuple[list[tuple[int, int]], list[Block]]:
    """Allocate, or free one that is picked, and check after each; return all sizes on the way."""
    alive: list[Block] = []
    sums = []
    for frees, size, pick in operations:
        if frees and alive:
            allocator.free(alive.pop(pick % len(alive)))
        else:
            try:
                alive.append(allocator.allocate(size))
            except OutOfMemory:
                continue
        check(allocator, alive)
        sums.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return sums, alive


def check(allocator: CachingAllocator, alive: Sequence[Block]) -> None:
    placed = sorted((block.address, block.size) for block in alive)
    for (address, size), (following, _) in zip(placed, placed[1:], strict=False):
        assert address + size <= following, "two tensors in one place"
    assert allocator.allocated_bytes == sum(size for _, size in placed)
    assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.limit_bytes is None or allocator.reserved_bytes <= allocator.limit_bytes


@given(
    operations=OPERATIONS, expandable=st.booleans(), limited=st.booleans(), bounded=st.booleans()
)
def test_any_sequence_keeps_tensors_apart_and_within_the_limit(
    operations: list[tuple[bool, int, int]], expandable: bool, limited: bool, bounded: bool
) -> None:
    def fresh() -> CachingAllocator:
        limit = GIB if limited else None
        return CachingAllocator(expandable=expandable, limit_bytes=limit, bounded=bounded)

    allocator = fresh()
    sums, alive = run(operations, allocator)
    assert run(operations, fresh())[0] == sums, "a replay gives the same"
    for block in alive:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.release()
    assert allocator.reserved_bytes == 0, "neighbours were joined to whole segments"
