"""GPU memory that no tensor can have: library workspaces, a growing desktop, holes between tensors.

Input is the machine and the sizes of a phase; output bytes. No torch.

Holes. With expandable segments a pool is one range that grows by pages, so only the last pages and the
holes are lost. A hole stays where a long-lived tensor was put behind a short-lived one: a block's
temporaries are freed, its inputs and results for the backward pass stay. So all holes together are at
most the temporaries of one block, and at most a share of the bytes a step allocates and frees. With a
segment for each request, tensors of other buckets leave holes in their segments too. The shares are the
highest that replays of default plans have shown (`scripts/allocator_table.py`, docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.hardware.machine import GIB, Gpu, desktop_bytes

MIB = 2**20
CUBLAS_BYTES, HOPPER_CUBLAS_BYTES = 8320 * 2**10, 32 * MIB
"""cuBLAS workspace of each thread: CUBLAS_WORKSPACE_CONFIG `:4096:2:16:8`, `:4096:8` from capability 9.0 on."""
HOPPER = (9, 0)
THREADS = 2
"""The forward pass runs in Python's thread, the backward pass in autograd's; each has its cuBLAS handle."""
KERNELS_BYTES = 64 * MIB
"""Workspace of attention's backward pass (fp32 sums of dQ) and of cuDNN, both allocated off the peak."""
PAGES_BYTES = 128 * MIB
HOLES = 0.1
"""Holes as a share of the bytes a step moves, capped at the temporaries of one block."""
SEGMENTS, HOLES_OF_SEGMENTS = 0.08, 0.12
"""With a segment for each request: unused rests that buckets leave in segments, and holes, as shares."""


@dataclass(frozen=True, kw_only=True)
class DeviceSurroundings:
    """GPU memory used beside the tensors of a run.

    `expandable`: the allocator grows its segments. `desktop_bytes` are left to other programs,
    `cublas_bytes` are the workspace of each thread that runs matrix products.
    """

    expandable: bool = True
    desktop_bytes: int = 0
    cublas_bytes: int = CUBLAS_BYTES

    @property
    def library_bytes(self) -> int:
        return THREADS * self.cublas_bytes + KERNELS_BYTES

    def holes_bytes(self, *, moved_bytes: int, temporary_bytes: int) -> int:
        """Return the bytes that the allocator reserves beyond all tensors.

        `moved_bytes` are allocated and freed within a step, `temporary_bytes` of them within a block.
        """
        if self.expandable:
            return PAGES_BYTES + min(int(HOLES * moved_bytes), temporary_bytes)
        holes_bytes = min(int(HOLES_OF_SEGMENTS * moved_bytes), temporary_bytes)
        return PAGES_BYTES + int(SEGMENTS * moved_bytes) + holes_bytes


def surroundings(
    gpu: Gpu | None, *, expandable: bool, limit_gib: float | None
) -> DeviceSurroundings:
    """Return the memory beside the tensors; memory above `limit_gib` already leaves the desktop its room."""
    if gpu is None:
        return DeviceSurroundings()
    unasked_bytes = 0 if limit_gib is None else max(0, gpu.free_bytes - int(limit_gib * GIB))
    recent = gpu.compute_capability is not None and gpu.compute_capability >= HOPPER
    return DeviceSurroundings(
        expandable=expandable,
        desktop_bytes=max(0, desktop_bytes(gpu) - unasked_bytes),
        cublas_bytes=HOPPER_CUBLAS_BYTES if recent else CUBLAS_BYTES,
    )
