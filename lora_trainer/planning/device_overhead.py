"""What of a card no tensor can have: workspaces of libraries, a desktop that grows, holes between tensors.

Input is the machine and the sizes of a phase; output bytes. No torch.

Holes. With expandable segments a pool is one range that grows by pages, so nothing is lost but the last
pages and the holes in it. A hole is left where something long-lived was put behind something that went:
what a block makes while it runs goes, its inputs and results for the backward pass stay. So all holes
together are no more than what one block makes, and than a share of what a step moves. With a segment for
each request, holes are also what tensors of other buckets leave of theirs. The shares are the highest
that replays of default plans have shown (`scripts/allocator_table.py`, docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.hardware.machine import GIB, Gpu, desktop_bytes

MIB = 2**20
CUBLAS_BYTES, HOPPER_CUBLAS_BYTES = 8320 * 2**10, 32 * MIB
"""Of each thread that multiplies: `:4096:2:16:8` of CUBLAS_WORKSPACE_CONFIG, `:4096:8` from capability 9.0 on."""
HOPPER = (9, 0)
THREADS = 2
"""The forward pass runs in Python's, the backward pass in autograd's; each has a handle of its own."""
KERNELS_BYTES = 64 * MIB
"""Of attention's backward pass (fp32 sums of dQ) and of cuDNN, where the peak lies elsewhere."""
PAGES_BYTES = 128 * MIB
HOLES = 0.1
"""Of what a step moves, where what one block makes is not less."""
SEGMENTS, HOLES_OF_SEGMENTS = 0.08, 0.12
"""The same where each request has its segment, and what buckets leave of each other's."""


@dataclass(frozen=True, kw_only=True)
class DeviceSurroundings:
    """What is beside the tensors of a run on its card.

    `expandable`: the allocator grows its segments. `desktop_bytes` are left to other programs,
    `cublas_bytes` taken by each thread that multiplies.
    """

    expandable: bool = True
    desktop_bytes: int = 0
    cublas_bytes: int = CUBLAS_BYTES

    @property
    def library_bytes(self) -> int:
        return THREADS * self.cublas_bytes + KERNELS_BYTES

    def holes_bytes(self, *, moved_bytes: int, temporary_bytes: int) -> int:
        """Return what the allocator reserves beyond all tensors.

        `moved_bytes` come and go in a step, `temporary_bytes` of them within a block.
        """
        if self.expandable:
            return PAGES_BYTES + min(int(HOLES * moved_bytes), temporary_bytes)
        holes_bytes = min(int(HOLES_OF_SEGMENTS * moved_bytes), temporary_bytes)
        return PAGES_BYTES + int(SEGMENTS * moved_bytes) + holes_bytes


def surroundings(
    gpu: Gpu | None, *, expandable: bool, limit_gib: float | None
) -> DeviceSurroundings:
    """Return what is beside the tensors on a card; what a limit does not allow is room for a desktop already."""
    if gpu is None:
        return DeviceSurroundings()
    unasked_bytes = 0 if limit_gib is None else max(0, gpu.free_bytes - int(limit_gib * GIB))
    recent = gpu.compute_capability is not None and gpu.compute_capability >= HOPPER
    return DeviceSurroundings(
        expandable=expandable,
        desktop_bytes=max(0, desktop_bytes(gpu) - unasked_bytes),
        cublas_bytes=HOPPER_CUBLAS_BYTES if recent else CUBLAS_BYTES,
    )
