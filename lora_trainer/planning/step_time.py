"""Seconds of a step, from the rates of the GPU and the work and copies of the step.

How fast GPUs are: a table from the makers' data sheets, and a stand-in for GPUs that are not in it.

Rates are ceilings, of which training reaches a share.

How long an optimizer step takes: an estimate from FLOPs, memory traffic and transfers, as a range.

Input is the work of a step (`StepWork`) and a GPU or a number of cores; output is the shortest and the
longest time to expect, and a note that names the bottleneck. Plans are compared by `seconds`, the
geometric mean of the range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lora_trainer.common.wording import GIB
from lora_trainer.config.declare import KEEP_ATTENTION, BasePrecision, Precision
from lora_trainer.costs.base_costs import BaseCosts, FrozenBase
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import Load, pinned_shares

Range = tuple[float, float]
"""Seconds: the shortest and the longest to expect."""


# By a part of the driver's name for the GPU: TFLOP/s and GB/s.
_RATES: Mapping[str, tuple[float, float]] = {
    "B200": (1600, 8000), "H200": (790, 4300), "H100": (700, 3300), "A100": (250, 1550),
    "A10": (70, 600), "L4": (60, 300), "L40S": (180, 860), "V100": (100, 900),
    "Tesla T4": (30, 320), "RTX A6000": (140, 770), "RTX A5000": (100, 770), "RTX A4000": (70, 450),
    "RTX 5090": (200, 1790), "RTX 5080": (110, 960), "RTX 5070": (60, 670), "RTX 5060": (45, 450),
    "RTX 4090": (165, 1000), "RTX 4080": (95, 720), "RTX 4070": (58, 500), "RTX 4060": (30, 270),
    "RTX 3090": (71, 940), "RTX 3080": (59, 760), "RTX 3070": (40, 450), "RTX 3060": (25.5, 360),
    "RTX 2080": (40, 450), "RTX 2070": (30, 450), "RTX 2060": (25, 340),
    "MI300X": (1300, 5300), "MI210": (180, 1640), "RX 7900 XTX": (120, 960), "RX 7900 XT": (100, 800),
    "RX 9070": (150, 640), "RX 6900": (46, 510), "RX 6800": (32, 510), "Arc(TM) A770": (130, 560),
    "Arc(TM) B580": (115, 456), "Apple M1": (2.6, 68), "Apple M1 Max": (10, 400), "Apple M1 Ultra": (21, 800),
    "Apple M2": (3.6, 100), "Apple M2 Max": (13, 400), "Apple M2 Ultra": (27, 800), "Apple M3": (4.1, 100),
    "Apple M3 Max": (16, 400), "Apple M3 Ultra": (28, 820), "Apple M4": (4.6, 120), "Apple M4 Pro": (9, 273),
    "Apple M4 Max": (18, 546),
}  # fmt: skip
# (GiB, name): an unknown GPU of at most so many GiB is taken for this one, the first row that is enough.
_ORDINARY: tuple[tuple[float, str], ...] = (
    (6.5, "RTX 2060"),
    (9, "RTX 4060"),
    (13, "RTX 3060"),
    (17, "RTX 4060"),
    (26, "RTX 3090"),
    (34, "RTX 5090"),
    (50, "RTX A6000"),
)


def _card(gpu: Gpu) -> tuple[str, float, float]:
    """Return the row of a GPU with its FLOP/s and bytes/s: the longest name within its own, else that of its size."""
    # The longest, because "A10" is also a part of "A100", and "Apple M1" of "Apple M1 Max".
    named_row = max((row for row in _RATES if row in gpu.name), key=len, default="")
    size_gib = gpu.total_bytes / GIB
    row = named_row or next((row for limit, row in _ORDINARY if size_gib <= limit), "A100")
    tflops, gigabytes = _RATES[row]
    return row, tflops * 1e12, gigabytes * 1e9


# Share of the matrix rate that eager training reaches, as its elementwise kernels move much memory.
CARD_SHARE = (0.25, 0.8)
# Share of the memory rate that dequantising reaches, and copies from the host.
TRAFFIC_SHARE = (0.5, 0.9)
# Python, peft and autograd start one kernel in this time; small models on fast GPUs wait for it.
KERNEL_START_S = (20e-6, 70e-6)
# From pinned host memory, one way: PCIe 3 with 8 lanes to PCIe 4 with 16, as measured in practice.
LINK_BYTES_PER_S = (6e9, 22e9)
# From ordinary memory the driver copies twice, by way of a small pinned buffer: 2.2 of 5.7 GB/s on one
# GPU (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"), 0.3 to 0.6 on others.
UNPINNED_BYTES_PER_S = (2.4e9, 8.8e9)
FP32_SLOWDOWN = 4
# Measured on two cores: 49 GFLOP/s per core for a 4 M-parameter U-Net, everything included.
CPU_GFLOPS_PER_CORE = (20, 80)
# Bytes read and written to dequantise one weight to 16 bits, and the kernels that dequantise a layer.
DEQUANTISE_BYTES: Mapping[BasePrecision, float] = {"int8": 7.0, "fp8": 7.0, "nf4": 2.6}
DEQUANTISE_KERNELS: Mapping[BasePrecision, int] = {"int8": 2, "fp8": 2, "nf4": 3}
# A block that is recomputed without its matrix products still runs its other kernels. They take this share
# of the products' time: from the rooflines of FLUX.1, Z-Image and SDXL at 1024 px on several GPUs.
OTHER_KERNELS = 0.32
# Where blocks keep results of single kernels, Python inspects each kernel in both passes: 10 us (measured on
# a processor) for two thirds of a step's kernels and their views, as a share of the time to start a kernel.
WATCHED_KERNELS = 0.2
FORWARD_KERNELS = 1 / 3
"""Kernels of a pass without gradients, as a share of a training step's."""
STREAM_PASSES = 2
"""A streamed block is copied once for the forward pass and once to be recomputed for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one optimizer step: arithmetic, kernels, bytes to dequantise, bytes over the bus one way.

    `other_flops` stand for the non-product kernels of recomputed blocks, as arithmetic that takes as long.
    `bus_bytes` are copied while the GPU computes, `ordered_bytes` between its kernels; `unpinned_bytes` come
    from unpinned memory, so the host waits for each copy.
    """

    flops: float
    other_flops: float = 0.0
    kernels: int = 0
    dequantised_bytes: float = 0.0
    bus_bytes: float = 0.0
    ordered_bytes: float = 0.0
    unpinned_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Shortest and longest expected seconds of an optimizer step; `note` names the bottleneck."""

    low_s: float
    high_s: float
    note: str

    @property
    def seconds(self) -> float:
        """Geometric mean of the range, by which plans are compared."""
        return middle((self.low_s, self.high_s))


def step_work(
    load: Load, costs: BaseCosts, *, batch_size: int, pinnable_bytes: int | None
) -> StepWork:
    """Return the work of a step over `batch_size` images, in micro-batches of `load.micro_batch`.

    A process may pin `pinnable_bytes` of host memory, None: no limit. Passes for the base's own prediction
    run without gradients: they only go forward.
    """
    cost, base = costs.sample_cost(load.workload()), load.frozen_base(costs)
    images, forward = batch_size * (1 + load.twice), batch_size * load.as_base
    passes, forwards = math.ceil(images / load.micro_batch), math.ceil(forward / load.micro_batch)
    # Forward, backward, and when a block is recomputed.
    weight_passes = 2.0 if load.checkpointing == "none" else 3.0
    dequantised = passes * weight_passes + forwards if base.is_quantized else 0.0
    spared_flops = 0.0  # of matrix products that recomputed blocks do not repeat
    if keeps_results := load.checkpointing in KEEP_ATTENTION:
        everything = replace(load, checkpointing="full")
        spared_flops = float(costs.sample_cost(everything.workload()).step_flops - cost.step_flops)
    streamed = (passes * STREAM_PASSES + forwards) * base.streamed_bytes(load.streamed_blocks)
    # To the host in the forward pass, back in the backward pass.
    offloaded = 2 * cost.host_bytes * images
    blocks, inputs = pinned_shares(load, costs, pinnable_bytes=pinnable_bytes)
    started = (passes + forwards * FORWARD_KERNELS) * cost.kernels
    flops = cost.step_flops * images + cost.forward_flops * forward
    return StepWork(
        flops=flops,
        other_flops=OTHER_KERNELS * spared_flops * images,
        kernels=round(
            started * (1 + WATCHED_KERNELS * keeps_results) + dequantised * _layer_kernels(base)
        ),
        dequantised_bytes=dequantised * _layer_bytes(base),
        bus_bytes=blocks * streamed,
        ordered_bytes=inputs * offloaded,
        unpinned_bytes=(1 - blocks) * streamed + (1 - inputs) * offloaded,
    )


def forward_work(load: Load, costs: BaseCosts) -> StepWork:
    """Return the work of one prediction of `load.micro_batch` images without gradients."""
    cost, base = costs.sample_cost(load.workload()), load.frozen_base(costs)
    return StepWork(
        flops=cost.forward_flops * load.micro_batch,
        kernels=round(cost.kernels * FORWARD_KERNELS + base.is_quantized * _layer_kernels(base)),
        dequantised_bytes=base.is_quantized * _layer_bytes(base),
        bus_bytes=base.streamed_bytes(load.streamed_blocks),
    )


def _layer_bytes(base: FrozenBase) -> float:
    return base.linear_elements * DEQUANTISE_BYTES.get(base.kept_as, 0.0)


def _layer_kernels(base: FrozenBase) -> int:
    return len(base.shapes) * DEQUANTISE_KERNELS.get(base.kept_as, 0)


def step_time(work: StepWork, *, gpu: Gpu | None, threads: int, precision: Precision) -> StepTime:
    """Estimate a step on a GPU, or on `threads` cores of the processor where `gpu` is None."""
    if gpu is None:
        slow, fast = (rate * 1e9 * threads for rate in CPU_GFLOPS_PER_CORE)
        low_s, high_s = _range(work.flops + work.other_flops, (slow, fast))
        note = f"rough estimate for {threads} cores: {work.flops / 1e9:.1f} GFLOP a step"
        return StepTime(low_s=low_s, high_s=high_s, note=note)
    # The longest of computing, starting kernels and copying over the bus. Copies of weights run beside the
    # computation, so they cost only memory traffic and the time they take longer than it; a step waits for copies
    # of block inputs and for every copy of unpinned memory.
    row, flops_per_s, bytes_per_s = _card(gpu)
    rate = flops_per_s / (FP32_SLOWDOWN if precision == "fp32" else 1)
    computing = _range((work.flops + work.other_flops) / rate, CARD_SHARE)
    # Copies from the host are written to the same memory that the computation reads.
    moved_bytes = work.dequantised_bytes + work.bus_bytes
    beside = _range(moved_bytes / bytes_per_s, TRAFFIC_SHARE)
    fast_s, slow_s = KERNEL_START_S
    parts = {
        "arithmetic": (computing[0] + beside[0], computing[1] + beside[1]),
        "starting kernels": (work.kernels * fast_s, work.kernels * slow_s),
        "copies from host memory": _range(work.bus_bytes, LINK_BYTES_PER_S),
    }
    ordered = _range(work.ordered_bytes, LINK_BYTES_PER_S)
    unpinned = _range(work.unpinned_bytes, UNPINNED_BYTES_PER_S)
    name = row if row in gpu.name else f"{gpu.name} (rates of an {row})"
    note = (
        f"estimate for {name}: {work.flops / 1e12:.1f} TFLOP a "
        f"step, limited by {max(parts, key=lambda name: middle(parts[name]))}"
    )
    if work.unpinned_bytes:
        note += f", and waits for {work.unpinned_bytes / 1e9:.1f} GB of unpinned memory"
    return StepTime(
        low_s=max(low for low, _ in parts.values()) + ordered[0] + unpinned[0],
        high_s=max(high for _, high in parts.values()) + ordered[1] + unpinned[1],
        note=note,
    )


def _range(amount: float, slow_and_fast: tuple[float, float]) -> Range:
    slow, fast = slow_and_fast
    return amount / fast, amount / slow


def middle(ends: Range) -> float:
    """Return the geometric mean of a range, whose ends differ by factors."""
    return math.sqrt(ends[0] * ends[1])
