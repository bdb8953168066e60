"""The settings that decide memory and time, the costs of a base remembered, and the memory beside tensors. No torch.

The search varies a `Load`; `RememberedCosts` computes each question about a base once; `DeviceSurroundings` has the
memory that no tensor can have: library workspaces, a growing desktop, holes between tensors.

Holes. With expandable segments a pool is one range that grows by pages, so only the last pages and the
holes are lost. A hole stays where a long-lived tensor was put behind a short-lived one: a block's
temporaries are freed, its inputs and results for the backward pass stay. So all holes together are at
most the temporaries of one block, and at most a share of the bytes a step allocates and frees. With a
segment for each request, tensors of other buckets leave holes in their segments too. The shares are the
highest that replays of default plans have shown (`scripts/allocator_table.py`, docs/memory.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_trainer.config.base_precision import BaseMatmul, BasePrecision
from lora_trainer.config.config import AdapterSettings, Checkpointing, Precision, Targets
from lora_trainer.costs.cost_table import (
    adapter_shapes,
    known_checkpointing,
    linear_shapes,
    sample_cost,
)
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.hardware.devices import TorchType
from lora_trainer.hardware.machine import GIB, Gpu, desktop_bytes
from lora_trainer.lora.adapter_size import Shape, adapter_tensors, total_elements
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, FrozenBase

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
    return adapter.kind != "lora" or adapter.dora or adapter.init == "pissa"


@dataclass(kw_only=True)
class RememberedCosts:
    """The costs of one base, each workload computed once, as a search asks for the same few many times.

    All calls of one object must be about the same base: `facts` is no part of the keys.
    """

    family: Family
    costs: dict[Workload, SampleCost] = field(default_factory=dict)
    shapes: dict[Targets, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    linear: Mapping[str, tuple[int, int]] | None = None
    bases: dict[tuple[Precision, BasePrecision], FrozenBase] = field(default_factory=dict)
    text_shapes: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None
    tensors: dict[str, Counter[Shape]] = field(default_factory=dict)

    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, ...]]:
        if targets not in self.shapes:
            self.shapes[targets] = adapter_shapes(self.family, facts, targets=targets)
        return self.shapes[targets]

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        if self.text_shapes is None:
            self.text_shapes = self.family.text_adapter_shapes(facts)
        return self.text_shapes

    def linear_shapes(self, facts: BaseFacts) -> Mapping[str, tuple[int, int]]:
        if self.linear is None:
            self.linear = linear_shapes(self.family, facts)
        return self.linear

    def known_checkpointing(
        self, facts: BaseFacts, *, element_bytes: int, targets: Targets, wide_adapter: bool
    ) -> tuple[Checkpointing, ...]:
        return known_checkpointing(
            self.family,
            facts,
            element_bytes=element_bytes,
            targets=targets,
            wide_adapter=wide_adapter,
        )

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        if workload not in self.costs:
            self.costs[workload] = sample_cost(self.family, facts, workload)
        return self.costs[workload]

    def frozen_base(self, facts: BaseFacts, load: Load) -> FrozenBase:
        # The only two settings of a load that change how weights are kept; a search asks hundreds of times.
        key = (load.precision, load.base_precision)
        if key not in self.bases:
            self.bases[key] = FrozenBase(
                parameters=facts.parts["denoiser"].parameters,
                shapes=self.linear_shapes(facts),
                quantization_skip=self.family.traits.quantization_skip,
                block_pattern=self.family.traits.block_pattern,
                dtype=load.precision,
                kept_as=load.base_precision,
            )
        return self.bases[key]

    def block_of(self, module: str) -> str:
        """Return the name of the repeated block a module is in, or the empty string."""
        match = re.match(self.family.traits.block_pattern, module)
        return match[0] if match else ""

    def adapter_tensors(self, facts: BaseFacts, settings: AdapterSettings) -> Mapping[Shape, int]:
        """Return how many trained tensors there are of each shape: adapters and new tokens."""
        key = settings.model_dump_json()  # hash() refuses settings, because of `rank_pattern`
        if key not in self.tensors:
            shapes = self.adapter_shapes(facts, targets=settings.targets)
            tensors = adapter_tensors(shapes, settings)
            if settings.text_encoder:
                for component, text_shapes in self.text_adapter_shapes(facts).items():
                    tensors += adapter_tensors(text_shapes, settings, component=component)
            if settings.new_tokens:
                for text_shapes in self.text_adapter_shapes(facts).values():
                    width = next(iter(text_shapes.values()))[0]  # of the first layer's input
                    tensors += Counter({(settings.new_tokens, width): 1})
            self.tensors[key] = tensors
        return self.tensors[key]

    def adapter_parameters(self, facts: BaseFacts, settings: AdapterSettings) -> int:
        """Return how many numbers are trained."""
        return total_elements(self.adapter_tensors(facts, settings))


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
    base_matmul: BaseMatmul = "dequantized"
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
