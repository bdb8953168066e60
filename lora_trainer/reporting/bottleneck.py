"""The bottleneck of a training: where the time of a step goes, and the setting that would change it.

Input is measured seconds, output shares that add up to 1 and one sentence. No torch: kernels and
operations are given by name and duration, so tests can use any numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_trainer.config.running import RunConfig

Cause = Literal["data", "host", "compute", "memory", "saving"]
CAUSES: tuple[Cause, ...] = ("data", "host", "compute", "memory", "saving")
MATRIX_WORK = re.compile(
    r"gemm|gemv|\bmm\b|addmm|bmm|linear|matmul|conv|wgrad|dgrad|attention|fmha|flash|cutlass|cudnn"
    r"|xmma|winograd",
    re.IGNORECASE,
)
"""Operations and kernels limited by arithmetic, because they multiply matrices; all others move bytes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean seconds of one optimizer step under the profiler.

    `wall_s` is from step to step, with `data_wait_s` spent waiting for the next batch. `work_s` is the
    device's time by operation or kernel, where overlapping ones count fully. `save_s` is one save.
    """

    wall_s: float
    data_wait_s: float
    work_s: Mapping[str, float]
    save_s: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Shares of the time by cause, the largest cause, and a sentence with advice."""

    shares: Mapping[Cause, float]
    cause: Cause
    sentence: str


def verdict(measured: Measured, config: RunConfig) -> Verdict:
    """Judge a training of these settings; `auto` values must be resolved."""
    save_s = measured.save_s / _steps_per_save(config) if measured.save_s else 0.0
    matrices = sum(s for name, s in measured.work_s.items() if MATRIX_WORK.search(name))
    others = sum(measured.work_s.values()) - matrices
    # Overlapping kernels add up to more than the time they took together, so they are scaled down to it.
    room = max(0.0, measured.wall_s - measured.data_wait_s)
    squeeze = min(1.0, room / (matrices + others)) if matrices + others else 0.0
    seconds: dict[Cause, float] = {
        "data": measured.data_wait_s,
        "host": max(0.0, room - matrices - others),
        "compute": matrices * squeeze,
        "memory": others * squeeze,
        "saving": save_s,
    }
    total = sum(seconds.values())
    shares = {cause: seconds[cause] / total if total else 0.0 for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: shares[name])
    return Verdict(
        shares=shares,
        cause=cause,
        sentence=f"{_FOUND[cause].format(percent=f'{100 * shares[cause]:.0f} %')}: {_advice(cause, config)}",
    )


_FOUND: Mapping[Cause, str] = {
    "data": "Waiting for prepared batches takes {percent} of the time",
    "host": "The program between operations, not the device, takes {percent} of the time",
    "compute": "Matrix products, convolutions and attention take {percent} of the time",
    "memory": "Operations that only move numbers (norms, sums, copies) take {percent} of the time",
    "saving": "Saving takes {percent} of the time",
}


def _advice(cause: Cause, config: RunConfig) -> str:
    if cause == "data":
        ahead = config.data.prefetch_steps
        return f"raise data.prefetch_steps (now {ahead}), or put data.cache_dir on a faster disk"
    if cause == "saving":
        return f"raise output.save_every_steps (now {config.output.save_every_steps})"
    if cause == "host":
        return _more_at_once(config)
    if cause == "memory":
        if config.train.precision == "fp32" and config.hardware.device != "cpu":
            return "halve the bytes with train.precision=bf16 (now fp32), if the GPU supports it"
        return _more_at_once(config)
    return _less_arithmetic(config)


def _more_at_once(config: RunConfig) -> str:
    micro_batch, batch_size = config.memory.micro_batch, config.train.batch_size
    if micro_batch < batch_size:
        return (
            f"more images at once share the cost: raise memory.micro_batch (now {micro_batch} of "
            f"train.batch_size={batch_size}) if memory allows"
        )
    return (
        f"all images of a step ({batch_size}) are computed at once already; a larger "
        "train.batch_size costs less per image, and changes the training"
    )


def _less_arithmetic(config: RunConfig) -> str:
    if config.memory.gradient_checkpointing not in (False, "none"):
        return (
            "the device is fully used; memory.gradient_checkpointing="
            f"{config.memory.gradient_checkpointing} computes a part twice, so a lighter level "
            "is faster if memory allows"
        )
    if config.train.precision == "fp32" and config.hardware.device != "cpu":
        return "train.precision=bf16 (now fp32) uses the GPU's matrix units, if it has them"
    side_px = config.data.resolution
    return f"the device is fully used; only a lower data.resolution (now {side_px}) is faster"


def _steps_per_save(config: RunConfig) -> int:
    every = config.output.save_every_steps
    return every if every else config.train.steps
