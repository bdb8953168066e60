"""How many steps, how long a step, how much disk: the planner's formulas that are not about memory.

All are pure functions of plain values and say how they came to their answer. Times are estimates
from FLOPs and a table of cards, given as a range; an unknown card gives None and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.config import Precision
from lora_trainer.families.costs import SampleCost
from lora_trainer.memory import ELEMENT_BYTES, MASTER_BYTES, STATE_BYTES


@dataclass(frozen=True, kw_only=True)
class LengthRule:
    """Images a run trains on: `views` of each picture, within a floor and a ceiling."""

    views: int
    floor_images: int
    ceiling_images: int


# Concepts are learned in 1,000-1,500 steps of 2 from about 20 pictures. The floors keep tiny sets
# long enough to learn at all; the ceilings stop large ones when more passes no longer pay.
LENGTH_RULES: Mapping[str, LengthRule] = {
    "speed": LengthRule(views=60, floor_images=1_200, ceiling_images=10_000),
    "balanced": LengthRule(views=120, floor_images=2_400, ceiling_images=20_000),
    "quality": LengthRule(views=200, floor_images=4_000, ceiling_images=40_000),
}
# bf16 TFLOP/s with fp32 accumulation that large matmuls reach, from the makers' data sheets; the
# longest name that is part of the card's name counts.
CARD_TFLOPS: Mapping[str, float] = {
    "B200": 1600, "H200": 790, "H100": 700, "A10": 70, "A100": 250, "L4": 60, "L40S": 180,
    "RTX 5090": 200, "RTX 5080": 110, "RTX 5070": 60, "RTX 5060": 45,
    "RTX 4090": 165, "RTX 4080": 95, "RTX 4070": 58, "RTX 4060": 30,
    "RTX 3090": 71, "RTX 3080": 59, "RTX 3070": 40, "RTX 3060": 25.5,
    "RTX 2080": 40, "RTX 2070": 30, "RTX 2060": 25, "RTX A6000": 140, "RTX A5000": 100,
    "RTX A4000": 70, "Tesla T4": 30, "V100": 100,
}  # fmt: skip
# Share of that rate an eager U-Net step reaches: its elementwise kernels move much memory.
CARD_SHARE = (0.35, 0.8)
# Python, peft and autograd start one kernel in this time; small models on fast cards wait for it.
KERNEL_START_S = (20e-6, 70e-6)
FP32_SLOWDOWN = 4
# Measured on two cores: 49 GFLOP/s per core for a 4 M-parameter U-Net, everything included.
CPU_GFLOPS_PER_CORE = (20, 80)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps and the sentence that explains them."""

    steps: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Shortest and longest expected seconds of an optimizer step, or None; `note` says why."""

    seconds: tuple[float, float] | None
    note: str


def run_length(*, images: int, batch_size: int, priority: str) -> Length:
    """Return the steps of a run over `images` different pictures; repeats shift weight, not length.

    images seen = clamp(views x images, floor, ceiling), at least every picture once;
    steps = images seen / batch size, rounded up.
    """
    rule = LENGTH_RULES[priority]
    seen = min(max(rule.views * images, rule.floor_images), rule.ceiling_images)
    seen = max(seen, images)
    steps = math.ceil(seen / batch_size)
    return Length(
        steps=steps,
        reason=(
            f"{priority}: {rule.views} views of each of {images} images, kept between "
            f"{rule.floor_images:,} and {rule.ceiling_images:,} images seen: "
            f"{seen:,} at {batch_size} a step"
        ),
    )


def gpu_step_time(
    cost: SampleCost, *, card: str, precision: Precision, batch_size: int, micro_batch: int
) -> StepTime:
    """Estimate a step on a card: the longer of its arithmetic and of starting its kernels."""
    known = max((name for name in CARD_TFLOPS if name in card), key=len, default=None)
    if known is None:
        return StepTime(seconds=None, note=f"no speed is known for {card}")
    rate = CARD_TFLOPS[known] * 1e12 / (FP32_SLOWDOWN if precision == "fp32" else 1)
    flops = cost.step_flops * batch_size
    kernels = cost.kernels * math.ceil(batch_size / micro_batch)
    seconds = tuple(
        max(flops / rate / share, kernels * start)
        for share, start in zip(reversed(CARD_SHARE), KERNEL_START_S, strict=True)
    )
    bound = (
        "arithmetic"
        if flops / rate / CARD_SHARE[0] > kernels * KERNEL_START_S[1]
        else "starting kernels"
    )
    return StepTime(
        seconds=(seconds[0], seconds[1]),
        note=f"estimate for {known}: {flops / 1e12:.1f} TFLOP a step, bound by {bound}",
    )


def cpu_step_time(cost: SampleCost, *, threads: int, batch_size: int) -> StepTime:
    """Estimate a step on the processor from a range of speeds per core."""
    flops = cost.step_flops * batch_size
    slow, fast = (rate * 1e9 * threads for rate in CPU_GFLOPS_PER_CORE)
    note = f"rough estimate for {threads} cores: {flops / 1e9:.1f} GFLOP a step"
    return StepTime(seconds=(flops / fast, flops / slow), note=note)


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What decides the disk a run needs; `latent_elements` are those of the largest image."""

    images: int
    flip: bool
    captions_per_image: int
    latent_elements: int
    conditioning_bytes: int
    adapter_parameters: int
    optimizer: str
    export_precision: Precision
    keep_states: int
    keep_exports: int


def disk_bytes(use: DiskUse) -> dict[str, int]:
    """Return bytes of cache, states and exports; one more state and export exist while saving."""
    latents = use.images * (2 if use.flip else 1) * 2 * 4 * use.latent_elements
    texts = (use.images * use.captions_per_image + 1) * use.conditioning_bytes
    state = int(use.adapter_parameters * (MASTER_BYTES + STATE_BYTES[use.optimizer]))
    export = use.adapter_parameters * ELEMENT_BYTES[use.export_precision]
    return {
        "cache": latents + texts,
        "states": state * (use.keep_states + 1),
        "exports": export * (use.keep_exports + 2),
    }
