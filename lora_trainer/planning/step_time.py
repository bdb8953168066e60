"""Seconds of a step, from what the GPU can do and what the step computes and copies.

How fast cards are: a table from the makers' data sheets, and a stand-in for those not in it.

Input is a card's name and memory; output a `Card`. Rates are ceilings; `step_time.py` knows which share
of them training reaches.

How long an optimizer step takes: an estimate from FLOPs, memory traffic and transfers, as a range.

Input is what a step does (`StepWork`) and a card or a number of cores; output is the shortest and the
longest time to expect, and a note that says what sets it. `seconds` of a range is the value plans are
compared by: the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lora_trainer.config.base_precision import BasePrecision
from lora_trainer.config.config import Checkpointing, Precision
from lora_trainer.costs.sample_cost import KEEP_ATTENTION, SampleCost
from lora_trainer.families.base import BaseFacts
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.pinned_share import pinned_shares
from lora_trainer.planning.weight_bytes import FrozenBase

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card's 16-bit matrix rate with fp32 accumulation, and the rate of its memory.

    `stands_for` names a card that is not in the table and is taken for this one. Its int8 products are
    `int8_speedup` times as fast: four times on cards for games, which add 16-bit products up in fp32 at
    half the rate, else twice.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    int8_speedup: float = 2.0
    stands_for: str = ""


# TFLOP/s and GB/s.
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
_FOR_GAMES = ("RTX 30", "RTX 40", "RTX 50")
# An ordinary card of up to so many GiB; the first that is enough stands for an unknown one.
_ORDINARY: tuple[tuple[float, str], ...] = (
    (6.5, "RTX 2060"),
    (9, "RTX 4060"),
    (13, "RTX 3060"),
    (17, "RTX 4060"),
    (26, "RTX 3090"),
    (34, "RTX 5090"),
    (50, "RTX A6000"),
)
_LARGEST = "A100"


def card(name: str, *, total_bytes: int) -> Card:
    """Return the card of that name: the longest known name in it, else an ordinary card of its size."""
    known = max((found for found in _RATES if found in name), key=len, default=None)
    if known is not None:
        return _card(known)
    size_gib = total_bytes / GIB
    ordinary = next((found for limit, found in _ORDINARY if size_gib <= limit), _LARGEST)
    return _card(ordinary, stands_for=name)


def _card(name: str, *, stands_for: str = "") -> Card:
    tflops, gigabytes = _RATES[name]
    return Card(
        name=name,
        flops_per_s=tflops * 1e12,
        bytes_per_s=gigabytes * 1e9,
        int8_speedup=4.0 if name.startswith(_FOR_GAMES) else 2.0,
        stands_for=stands_for,
    )


# Share of the matrix rate that eager training reaches: its elementwise kernels move much memory.
CARD_SHARE = (0.25, 0.8)
# Share of the memory rate that dequantising reaches, and copies from the host.
TRAFFIC_SHARE = (0.5, 0.9)
# Python, peft and autograd start one kernel in this time; small models on fast cards wait for it.
KERNEL_START_S = (20e-6, 70e-6)
# From pinned host memory, one way: PCIe 3 with 8 lanes to PCIe 4 with 16, as measured in practice.
LINK_BYTES_PER_S = (6e9, 22e9)
# From ordinary memory the driver copies twice, by way of a small pinned buffer: 2.2 of 5.7 GB/s on one
# card (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"), 0.3 to 0.6 on others.
UNPINNED_BYTES_PER_S = (2.4e9, 8.8e9)
FP32_SLOWDOWN = 4
ARITHMETIC, LAUNCHES = "arithmetic", "starting kernels"
# Measured on two cores: 49 GFLOP/s per core for a 4 M-parameter U-Net, everything included.
CPU_GFLOPS_PER_CORE = (20, 80)
# Bytes read and written to make one element whole in 16 bits, and the kernels of a layer.
DEQUANTISE_BYTES: Mapping[BasePrecision, float] = {"int8": 7.0, "fp8": 7.0, "nf4": 2.6}
DEQUANTISE_KERNELS: Mapping[BasePrecision, int] = {"int8": 2, "fp8": 2, "nf4": 3}
# Of the time that the products of a forward pass take, what its other kernels take when a block runs
# again without its products: from the rooflines of FLUX.1, Z-Image and SDXL at 1024 px on several cards.
OTHER_KERNELS = 0.32
# A block that keeps some results looks at each kernel, in both of its passes: 10 us of Python (measured on
# a processor) for two thirds of a step's kernels and their views, over the time to start one.
WATCHED_KERNELS = 0.2
# Of a step's arithmetic, what the linear layers of the blocks are: 0.3 of SD1.5's at 512 px, 0.64 of
# SDXL's and 0.8 of a transformer's at 1024. Whether int8 products are faster hardly depends on it.
LINEAR_SHARE = 0.6
# Of a data sheet's int8 rate, what cuBLAS reaches of it beyond what it does in 16 bits.
INT8_REACHED = 0.75
# Bytes moved beside an int8 product for each number of its input and of its output, the mean of both
# passes: largest number, quotient, rounded, codes; int32 sums, scaled, added. And its kernels.
INT8_BYTES = (16.5, 25.5)
INT8_KERNELS = 8
FORWARD_KERNELS = 1 / 3
"""Of those of a step, the share that a pass without gradients starts."""
STREAM_PASSES = 2
"""A streamed block comes once for the forward pass and once to be recomputed and go backward."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one optimizer step does: arithmetic, kernels, bytes to dequantise, bytes over the bus one way.

    `int8_flops` of its arithmetic are int8 products, of forward passes only, beside which `int8_bytes` are moved.
    `other_flops` is arithmetic that would take as long as the kernels between products that are spared,
    `waited_bytes` come over the bus between steps, where no computation hides them, and so do
    `unpinned_bytes`, from memory that is not pinned: the host waits for each of those copies.
    """

    flops: float
    other_flops: float
    kernels: int
    dequantised_bytes: float
    bus_bytes: float
    waited_bytes: float = 0.0
    unpinned_bytes: float = 0.0
    int8_flops: float = 0.0
    int8_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Shortest and longest expected seconds of an optimizer step; `note` says what sets them."""

    low_s: float
    high_s: float
    note: str

    @property
    def seconds(self) -> float:
        """One number to compare plans by."""
        return math.sqrt(self.low_s * self.high_s)


def step_work(
    load: Load,
    *,
    facts: BaseFacts,
    costs: RememberedCosts,
    batch_size: int,
    pinnable_bytes: int | None,
) -> StepWork:
    """Return what a step over `batch_size` images does, in micro-batches of `load.micro_batch`.

    Of host memory `pinnable_bytes` can be pinned, None: all.
    Passes for the base's own prediction keep nothing: they go forward alone.
    """
    cost, base = costs.sample_cost(facts, load.workload()), costs.frozen_base(facts, load)
    images, forward = batch_size * (1 + load.twice), batch_size * load.as_base
    passes, forwards = math.ceil(images / load.micro_batch), math.ceil(forward / load.micro_batch)
    weights = passes * _weight_passes(load) + forwards if base.is_quantized else 0.0
    spared = _spared_flops(load, cost, facts=facts, costs=costs)
    streamed = (passes * STREAM_PASSES + forwards) * base.streamed_bytes(load.streamed_blocks)
    offloaded = 2 * cost.host_bytes * images
    modulation = (images + forward) * base.away_bytes / max(1, base.samples_ahead)
    pinned = pinned_shares(load, facts=facts, costs=costs, pinnable_bytes=pinnable_bytes)
    started = passes + forwards * FORWARD_KERNELS
    flops = cost.step_flops * images + cost.forward_flops * forward
    # Backwards a card may have no int8 product (`network/quantized_matmul.py` asks it): none is counted on.
    ahead = 1 - 1 / _weight_passes(load) if load.base_matmul == "int8" else 0.0
    share = LINEAR_SHARE * ahead
    # Layers of vectors are dequantised in any case, and are not told from others here: all are counted.
    layer_kernels = _layer_kernels(base) + ahead * len(base.shapes) * INT8_KERNELS
    there = base.linear_elements - base.away_elements
    rows = share * flops / (2 * there) if share else 0.0  # of all passes
    return StepWork(
        flops=flops,
        other_flops=OTHER_KERNELS * spared * images,
        kernels=round(
            started * cost.kernels * (1 + WATCHED_KERNELS * _watched_share(load))
            + weights * layer_kernels
        ),
        dequantised_bytes=weights * _layer_bytes(base),
        bus_bytes=pinned.streamed * streamed + pinned.offloaded * offloaded,
        waited_bytes=pinned.modulation * modulation,
        unpinned_bytes=(1 - pinned.streamed) * streamed
        + (1 - pinned.offloaded) * offloaded
        + (1 - pinned.modulation) * modulation,
        int8_flops=share * flops,
        int8_bytes=rows * _row_bytes(base),
    )


def forward_work(load: Load, *, facts: BaseFacts, costs: RememberedCosts) -> StepWork:
    """Return what one prediction of `load.micro_batch` images does: forwards, nothing kept."""
    cost, base = costs.sample_cost(facts, load.workload()), costs.frozen_base(facts, load)
    weights = 1.0 if base.is_quantized else 0.0
    return StepWork(
        flops=cost.forward_flops * load.micro_batch,
        other_flops=0.0,
        kernels=round(cost.kernels * FORWARD_KERNELS + weights * _layer_kernels(base)),
        dequantised_bytes=weights * _layer_bytes(base),
        bus_bytes=base.streamed_bytes(load.streamed_blocks),
    )


def _weight_passes(load: Load) -> float:
    """Return how often a layer is made whole: forward, backward, and when its block runs again."""
    if load.checkpointing == "none":
        return 2.0
    return 3.0 - (load.kept_share if load.checkpointing == "light" else 0.0)


def _watched_share(load: Load) -> float:
    """Return the share of the blocks that keep some of their results."""
    watched: Mapping[Checkpointing, float] = {
        "light": 1 - load.kept_share,
        "selective": 1.0,
        "full": load.kept_share,
    }
    return watched.get(load.checkpointing, 0.0)


def _spared_flops(
    load: Load, cost: SampleCost, *, facts: BaseFacts, costs: RememberedCosts
) -> float:
    """Return the arithmetic of products that do not run again in blocks that do."""
    if load.checkpointing not in KEEP_ATTENTION and not load.kept_share:
        return 0.0
    everything = replace(load, checkpointing="full", kept_share=0.0)
    spared = costs.sample_cost(facts, everything.workload()).step_flops - cost.step_flops
    return spared * (1 - (load.kept_share if load.checkpointing == "light" else 0.0))


def _layer_bytes(base: FrozenBase) -> float:
    return (base.linear_elements - base.away_elements) * DEQUANTISE_BYTES.get(base.kept_as, 0.0)


def _layer_kernels(base: FrozenBase) -> int:
    return (len(base.shapes) - len(base.away)) * DEQUANTISE_KERNELS.get(base.kept_as, 0)


def _row_bytes(base: FrozenBase) -> float:
    of_input, of_output = INT8_BYTES
    return sum(
        of_input * fan_in + of_output * out
        for name, (fan_in, out) in base.shapes.items()
        if name not in base.away
    )


def gpu_step_time(work: StepWork, card: Card, *, precision: Precision) -> StepTime:
    """Estimate a step on a card: the longest of computing, starting kernels and waiting for the bus.

    Copies run beside the computation, so they cost what they take longer and the device's memory traffic;
    those that a step waits for come on top, and all of memory that is not pinned.
    """
    ranges = gpu_bounds(work, card, precision=precision)
    bound = max(ranges, key=lambda name: math.sqrt(ranges[name][0] * ranges[name][1]))
    waited = _range(work.waited_bytes, LINK_BYTES_PER_S)
    unpinned = _range(work.unpinned_bytes, UNPINNED_BYTES_PER_S)
    waits = f", and waits for {work.unpinned_bytes / 1e9:.1f} GB of unpinned memory"
    waits = waits if work.unpinned_bytes else ""
    taken = f", taken for an {card.name}" if card.stands_for else ""
    return StepTime(
        low_s=max(low for low, _ in ranges.values()) + waited[0] + unpinned[0],
        high_s=max(high for _, high in ranges.values()) + waited[1] + unpinned[1],
        note=f"estimate for {card.stands_for or card.name}{taken}: "
        f"{work.flops / 1e12:.1f} TFLOP a step, bound by {bound}{waits}",
    )


def gpu_bounds(
    work: StepWork, card: Card, *, precision: Precision
) -> Mapping[str, tuple[float, float]]:
    """Return how long each part of a step takes by itself, at least and at most, in seconds."""
    rate = card.flops_per_s / (FP32_SLOWDOWN if precision == "fp32" else 1)
    low, high = _range(_arithmetic_s(work, card, rate=rate), CARD_SHARE)
    # What is copied beside the computation is written to the memory that this reads.
    traffic = (work.dequantised_bytes + work.int8_bytes + work.bus_bytes) / card.bytes_per_s
    beside = _range(traffic, TRAFFIC_SHARE)
    return {
        ARITHMETIC: (low + beside[0], high + beside[1]),
        LAUNCHES: (work.kernels * KERNEL_START_S[0], work.kernels * KERNEL_START_S[1]),
        "copies from host memory": _range(work.bus_bytes, LINK_BYTES_PER_S),
    }


def _arithmetic_s(work: StepWork, card: Card, *, rate: float) -> float:
    int8_rate = card.flops_per_s * card.int8_speedup * INT8_REACHED
    plain_flops = work.flops + work.other_flops - work.int8_flops
    return plain_flops / rate + work.int8_flops / int8_rate


def _range(amount: float, slow_and_fast: tuple[float, float]) -> tuple[float, float]:
    slow, fast = slow_and_fast
    return amount / fast, amount / slow


def cpu_step_time(work: StepWork, *, threads: int) -> StepTime:
    """Estimate a step on the processor from a range of speeds per core."""
    slow, fast = (rate * 1e9 * threads for rate in CPU_GFLOPS_PER_CORE)
    flops = work.flops + work.other_flops
    return StepTime(
        low_s=flops / fast,
        high_s=flops / slow,
        note=f"rough estimate for {threads} cores: {work.flops / 1e9:.1f} GFLOP a step",
    )
