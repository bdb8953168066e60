"""The search for what fits: micro-batch, then checkpointing, then no sample images. No torch.

Input is the load as wanted and the memory there is; output is the fastest load that fits, nothing
in it above what was wanted. When none fits, the error names the nearest setting that would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lora_trainer.errors import MachineError
from lora_trainer.memory import GIB, Load, Prediction

Predictor = Callable[[Load], Prediction]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bytes that may be used, and what sets them, to follow a size in a sentence."""

    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{gib(self.bytes)} {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits; `sampling_bytes` is the peak for which sample images were dropped, else 0."""

    load: Load
    prediction: Prediction
    sampling_bytes: int = 0


def fit(
    wanted: Load, *, checkpointing: tuple[bool, ...], limit: Limit, step_px: int, predict: Predictor
) -> Fit:
    """Return the fastest load that fits: without checkpointing first, then the largest micro-batch.

    `checkpointing` has the choices allowed, `step_px` the steps a resolution can take. Raises
    MachineError when micro-batch 1 with checkpointing and without sample images is still too much.
    """
    silent = replace(wanted, samples=False)
    for choice in checkpointing:
        for micro_batch in range(wanted.micro_batch, 0, -1):
            load = replace(silent, micro_batch=micro_batch, checkpointing=choice)
            if (prediction := predict(load)).fits:
                return _with_samples(load, prediction, wanted=wanted, predict=predict)
    least = replace(silent, micro_batch=1, checkpointing=True)
    raise _nothing_fits(least, limit=limit, step_px=step_px, predict=predict)


def _with_samples(load: Load, prediction: Prediction, *, wanted: Load, predict: Predictor) -> Fit:
    if not wanted.samples:
        return Fit(load=load, prediction=prediction)
    sampled = replace(load, samples=True)
    with_samples = predict(sampled)
    if with_samples.fits:
        return Fit(load=sampled, prediction=with_samples)
    return Fit(load=load, prediction=prediction, sampling_bytes=with_samples.peak_bytes)


def _nothing_fits(least: Load, *, limit: Limit, step_px: int, predict: Predictor) -> MachineError:
    need = predict(least)
    phase = max(need.phases, key=lambda name: need.phases[name])
    how = " (micro-batch 1, checkpointing)" if phase == "training" else ""
    found = (
        f"this run needs at least {gib(need.peak_bytes)} for {phase}{how}, and there are {limit}"
    )
    smallest = need.peak_bytes
    for setting, load in _smaller(least, step_px=step_px):
        prediction = predict(load)
        if prediction.fits:
            return MachineError(found, fix=f"use --set {setting}, which fits")
        smallest = min(smallest, prediction.peak_bytes)
    place = "a card" if least.device == "cuda" else "a machine"
    return MachineError(
        found, fix=f"use {place} with {gib(smallest)} free, or a smaller base model"
    )


def _smaller(least: Load, *, step_px: int) -> Iterator[tuple[str, Load]]:
    """Yield settings that take less memory, those that change the result least first."""
    if least.precision == "fp32" and least.device == "cuda":
        yield "train.precision=fp16", replace(least, precision="fp16")
    if least.optimizer == "adamw":
        yield "optimizer.name=adamw8bit", replace(least, optimizer="adamw8bit")
    for rank in (128, 64, 32, 16, 8, 4):
        if rank < least.adapter.rank:
            smaller = least.adapter.model_copy(update={"rank": rank})
            yield f"adapter.rank={rank}", replace(least, adapter=smaller)
    for side_px in range(least.sample_side_px - step_px, step_px - 1, -step_px):
        shrunk = replace(least, bucket_px=(side_px, side_px), sample_side_px=side_px)
        yield f"data.resolution={side_px}", shrunk


def gib(size: int) -> str:
    """Return a size as people read it."""
    return f"{size / GIB:.2f} GiB"
