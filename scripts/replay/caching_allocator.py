"""A model of PyTorch's caching allocator: the GPU memory it reserves for a sequence of tensors. No torch.

A tensor is a block in a segment. The allocator requests a segment from the driver when no free block is
large enough, and keeps it after all its blocks are freed; free space between blocks in use is lost to
larger tensors. Input is sizes in bytes in the order of allocation and release; output the allocated and the
reserved bytes. `expandable_segments` chooses between two kinds: a segment for each request, or one range
of addresses for each pool, into which pages are mapped.

Facts from c10/cuda/CUDACachingAllocator.cpp of torch 2.10 to 2.13 with its default settings. Left out: CUDA
graphs' own pools, `record_stream`, `max_split_size_mb` and `garbage_collection_threshold`. The driver's
addresses are unknown: segments of equal size are reused in the order of their creation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

MIB = 2**20
LEAST_BLOCK_BYTES = 512
"""Tensor sizes are rounded up to a multiple of this."""
SMALL_BYTES = MIB
"""The largest block of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment for blocks below `OWN_SEGMENT_BYTES`; also the page size of the large pool's expandable segments."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Blocks of at least this size get a segment of their own size."""
SEGMENT_STEP_BYTES = 2 * MIB
_ADDRESSES = LARGE_SEGMENT_BYTES << 26
"""Distance of two segments' addresses, so that their blocks never touch; a multiple of every page size."""

Event = tuple[int, int]
"""(tensor number, bytes) for an allocation, (tensor number, 0) for a release."""


class OutOfMemory(Exception):
    """A block fits neither the reserved memory nor the limit, even with all cached segments released."""

    def __init__(self, *, size_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{size_bytes:,} bytes do not fit: {allocated_bytes:,} allocated, {reserved_bytes:,} reserved"
        )
        self.reserved_bytes = reserved_bytes


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, linked to its neighbours. An unmapped block has addresses but no memory."""

    address: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    used: bool = False
    mapped: bool = True

    @property
    def is_free(self) -> bool:
        return not self.used


@dataclass(eq=False)
class _Pool:
    """Free blocks of one stream, all small or all large, by size and address."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))  # no two have one address
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """Allocates and frees blocks; `limit_bytes` bounds the sum of all segments.

    `bounded`: the limit is set by `set_per_process_memory_fraction`, which counts a whole request even
    where an expandable segment has a part of it free. `retries` counts how often all cached memory was
    released to make room for a block; each time the host waits for the device.
    """

    def __init__(
        self, *, expandable: bool, limit_bytes: int | None = None, bounded: bool = False
    ) -> None:
        self.expandable, self.limit_bytes, self.bounded = expandable, limit_bytes, bounded
        self.allocated_bytes = self.reserved_bytes = 0
        self.most_allocated_bytes = self.most_reserved_bytes = 0
        self.retries = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._segments = 0

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Return a block of at least this size; raises OutOfMemory."""
        size = rounded_bytes(size_bytes)
        pool = self._pool(small=size <= SMALL_BYTES, stream=stream)
        # torch's order: a free block, a new segment, and if the driver has no room, release and try again.
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None:
            self.retries += 1
            self.release()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(
                size_bytes=size,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block and join it with free neighbours."""
        assert block.used
        block.used = False
        self.allocated_bytes -= block.size
        self._join(block)
        block.pool.add(block)

    def release(self) -> None:
        """Return free memory to the driver: whole segments, or whole pages of expandable segments."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.drop(block)
                    self.reserved_bytes -= block.size

    # ---- where a block comes from

    def _pool(self, *, small: bool, stream: int) -> _Pool:
        key = (small, stream)
        if key not in self._pools:
            self._pools[key] = _Pool(small=small)
        return self._pools[key]

    def _cached(self, pool: _Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough out of its pool; None: there is none.

        A block that can grow counts with the addresses behind it, so that other blocks are used first.
        """
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if self.expandable:
            while index + 1 < len(pool.free) and (
                _growable(pool.free[index + 1][2]) < _growable(pool.free[index][2])
            ):
                index += 1
        return pool.free.pop(index)[2]

    def _new(self, pool: _Pool, size: int) -> Block | None:
        segment_size = segment_bytes(size)
        if self.bounded and not self._has_room(segment_size):
            return None
        if self.expandable:
            return self._grown(pool, size)
        if not self._reserve(segment_size):
            return None
        return Block(self._new_address(), segment_size, pool)

    def _new_address(self) -> int:
        self._segments += 1
        return self._segments * _ADDRESSES

    def _has_room(self, size: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + size <= self.limit_bytes

    def _reserve(self, size: int) -> bool:
        if not self._has_room(size):
            return False
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return True

    def _split(self, block: Block, size: int) -> None:
        """Cut a block to `size` and free the rest; rests of 1 MiB or less stay with large unexpandable blocks."""
        rest = block.size - size
        fine = block.pool.small or self.expandable
        if not (rest >= LEAST_BLOCK_BYTES if fine else rest > SMALL_BYTES):
            return
        remaining = Block(block.address + size, rest, block.pool)
        block.size = size
        _link(block, remaining)
        block.pool.add(remaining)

    def _join(self, block: Block) -> None:
        """Merge a free block with free neighbours, mapped or unmapped like it; it must be in no pool."""
        before, after = block.before, block.after
        if before is not None and before.is_free and before.mapped == block.mapped:
            block.pool.drop(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free and after.mapped == block.mapped:
            block.pool.drop(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    # ---- expandable segments

    def _grown(self, pool: _Pool, size: int) -> Block | None:
        """Map pages at the lowest address with room, using free memory right before it too."""
        block = _room(pool, size) or self._new_range(pool)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(following, min(following.size, size - block.size)):
                return None
            block = following  # `_map` joined it with the free block before it
        pool.drop(block)
        return block

    def _new_range(self, pool: _Pool) -> Block:
        block = Block(self._new_address(), _ADDRESSES // 2, pool, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages that hold the first `size` bytes of an unmapped block, all or none."""
        pages = math.ceil(size / block.pool.page_bytes) * block.pool.page_bytes
        if not self._reserve(pages):
            return False
        block.pool.drop(block)
        if pages < block.size:
            rest = Block(block.address + pages, block.size - pages, block.pool, mapped=False)
            block.size = pages
            _link(block, rest)
            rest.pool.add(rest)
        block.mapped = True
        self._join(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return the pages that lie wholly within a free block to the driver."""
        page = block.pool.page_bytes
        # Start rounded up and end rounded down to pages: a page that another block uses must stay.
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        block.pool.drop(block)
        if start > block.address:
            ahead = Block(block.address, start - block.address, block.pool)
            if block.before is not None:
                _link_only(block.before, ahead)
            _link_only(ahead, block)
            ahead.pool.add(ahead)
        if end < block.address + block.size:
            behind = Block(end, block.address + block.size - end, block.pool)
            _link(block, behind)
            behind.pool.add(behind)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved_bytes -= block.size
        self._join(block)
        block.pool.add(block)


def rounded_bytes(size_bytes: int) -> int:
    """Return a tensor's size rounded up as the allocator does."""
    blocks = max(1, -(-size_bytes // LEAST_BLOCK_BYTES))
    return blocks * LEAST_BLOCK_BYTES


def segment_bytes(size: int) -> int:
    """Return the bytes requested from the driver for a block of this size."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _growable(block: Block) -> int:
    """Return a free block's size including the unmapped addresses behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(pool: _Pool, size: int) -> Block | None:
    """Return the first block of a run of free or unmapped neighbours that hold `size` bytes together."""
    for _, block in pool.unmapped:
        before = block.before
        if before is not None and before.is_free and _has_addresses(before, size):
            return before
        if _has_addresses(block, size):
            return block
    return None


def _has_addresses(block: Block | None, size: int) -> bool:
    while block is not None and block.is_free:
        size -= block.size
        if size <= 0:
            return True
        block = block.after
    return False


def _link(block: Block, following: Block) -> None:
    """Insert `following` between `block` and its successor."""
    following.after = block.after
    if following.after is not None:
        following.after.before = following
    _link_only(block, following)


def _link_only(block: Block, following: Block) -> None:
    block.after, following.before = following, block


# ---- sequences


@dataclass(kw_only=True)
class Replay:
    """Feeds sequences of events to an allocator."""

    allocator: CachingAllocator
    _blocks: dict[int, Block] = field(default_factory=dict)

    def run(self, events: Iterable[Event]) -> None:
        """Replay allocations and releases, then free the remaining tensors, as a training step would."""
        alive: dict[int, Block] = {}
        allocate, free = self.allocator.allocate, self.allocator.free
        for number, size in events:
            if size:
                alive[number] = allocate(size)
            else:
                free(alive.pop(number))
        for block in alive.values():
            free(block)

    def hold(self, sizes: Iterable[int]) -> Callable[[], None]:
        """Allocate tensors of these sizes; return a function that frees them."""
        blocks = [self.allocator.allocate(size) for size in sizes]

        def give_back() -> None:
            for block in blocks:
                self.allocator.free(block)

        return give_back


def highest_sum(events: Iterable[Event]) -> int:
    """Return the largest sum of bytes alive at a time, unrounded."""
    alive: dict[int, int] = {}
    return max(_sums(events, alive), default=0)


def _sums(events: Iterable[Event], alive: dict[int, int]) -> Iterator[int]:
    total = 0
    for number, size in events:
        total += size - alive.pop(number, 0)
        if size:
            alive[number] = size
        yield total
