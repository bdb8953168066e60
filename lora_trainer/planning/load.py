"""The settings that decide memory and time, and the memory beside tensors. No torch.

The search varies a `Load`; `DeviceSurroundings` has the memory that no tensor can have: library workspaces, a
growing desktop, holes between tensors.

Holes. With expandable segments a pool is one range that grows by pages, so only the last pages and the
holes are lost. A hole stays where a long-lived tensor was put behind a short-lived one: a block's
temporaries are freed, its inputs and results for the backward pass stay. So all holes together are at
most the temporaries of one block, and at most a share of the bytes a step allocates and frees. With a
segment for each request, tensors of other buckets leave holes in their segments too. The shares are the
highest that replays of default plans have shown (`scripts/allocator_table.py`, docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.common.wording import GIB
from lora_trainer.config.declare import BasePrecision, Checkpointing, Precision
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.base_costs import ELEMENT_BYTES, BaseCosts, FrozenBase
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.hardware.devices import TorchType
from lora_trainer.hardware.machine import desktop_bytes
from lora_trainer.hardware.nvml import Gpu

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
    # A limit below the free memory leaves room for the desktop already: it is not subtracted twice.
    unasked_bytes = 0 if limit_gib is None else max(0, gpu.free_bytes - int(limit_gib * GIB))
    recent = gpu.compute_capability is not None and gpu.compute_capability >= HOPPER
    return DeviceSurroundings(
        expandable=expandable,
        desktop_bytes=max(0, desktop_bytes(gpu) - unasked_bytes),
        cublas_bytes=HOPPER_CUBLAS_BYTES if recent else CUBLAS_BYTES,
    )


def runs_wide(adapter: AdapterSettings) -> bool:
    """Say whether adapted layers keep fp32 copies of their inputs, as all kinds except a plain LoRA do."""
    return adapter.kind != "lora" or adapter.dora


@dataclass(frozen=True, kw_only=True)
class Load:
    """The settings that decide how much memory and time a run takes; `bucket_px` is (width, height).

    `twice` is the share of a step's images that appear a second time for class preservation, `as_base` the
    share for which the base's own prediction is computed too. `beside` is the GPU memory beside tensors.
    """

    device: TorchType
    precision: Precision
    base_precision: BasePrecision
    adapter: AdapterSettings
    optimizer: str
    text_precision: Precision
    text_offload: bool
    micro_batch: int
    checkpointing: Checkpointing
    streamed_blocks: int
    bucket_px: tuple[int, int]
    samples: bool
    sample_side_px: int
    prepared_samples: int
    averaged: bool = False
    masked: bool = False
    twice: float = 0.0
    as_base: float = 0.0
    keeps_best: bool = False
    beside: DeviceSurroundings = DeviceSurroundings()

    def workload(self) -> Workload:
        width_px, height_px = self.bucket_px
        return Workload(
            height_px=height_px,
            width_px=width_px,
            element_bytes=ELEMENT_BYTES[self.precision],
            rank=self.adapter.rank,
            targets=self.adapter.targets,
            checkpointing=self.checkpointing,
            # Costs are per sample, and the same from two samples on: fewer workloads to compute.
            micro_batch=min(self.micro_batch, 2),
            wide_adapter=runs_wide(self.adapter),
        )

    def frozen_base(self, costs: BaseCosts) -> FrozenBase:
        """Return the base's weights in this load's precisions."""
        return costs.frozen_base(self.precision, self.base_precision)
