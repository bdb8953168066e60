"""Whether a training learns at all: its gradients, its weights, and the loss at each noise level.

Pure functions over small values that travel in the resume state. None of the three is a judgement of how
well it learns, and none has noise to mistake for a finding: a gradient norm that is exactly zero, weights
that have not left zero, and losses of the same pictures with the same noise before and after, which do
not differ. A run that learns anything, however slowly, shows all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_trainer.errors import TrainingStopped

ZERO_STEPS = 25
"""Steps in a row without any gradient, and the step after which weights have left zero."""
LOOK_IMAGES, LOOK_STEPS, LOOK_SHARE = 200, 50, 0.2
"""The losses are compared once a run has seen so many images in so many steps, this share of its own."""
TINY_LOSS = 1e-20
"""Below it gradients vanish from 32-bit sums of squares."""
LEAST_CHANGE = 3e-4
"""Relative change of a band's loss by the end, extrapolated from the look, below which nothing was learned."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Steps in a row with zero gradients, and the losses by noise level before the first step, if compared."""

    zero_gradients: int = 0
    base: Sequence[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a run that learns nothing is explained with.

    `rate` is the learning rate, `rate_sum` that of the steps so far added up; `loss_scale` that of fp16,
    None without. `reached`: some trained parameter had a gradient at all. `images` is per step.
    """

    device: str
    rate: float
    rate_sum: float
    loss_scale: float | None
    reached: bool = True
    alpha_over_rank: float = 1.0


def look_step(*, steps: int, batch_size: int) -> int | None:
    """Return the step whose losses are compared with those before the first; None: the run is too short."""
    step = max(LOOK_STEPS, -(-LOOK_IMAGES // batch_size), round(LOOK_SHARE * steps))
    return step if 2 * step <= steps else None


def after_gradient(learning: Learning, *, norm: float) -> Learning:
    """Take in the finite gradient norm of a step, before clipping."""
    if norm != 0.0:
        return replace(learning, zero_gradients=0) if learning.zero_gradients else learning
    return replace(learning, zero_gradients=learning.zero_gradients + 1)


def least_change(base: Sequence[float], now: Sequence[float], *, so_far: float) -> float:
    """Return by how much the band that changed most will have changed by the end, relative to its loss.

    `so_far` is the share of the run's learning rates, added up, that is behind it: while an adapter is
    small, its effect grows with them.
    """
    changes = [abs(new - old) / old for old, new in zip(base, now, strict=True) if old > 0]
    return max(changes, default=0.0) / max(so_far, 1e-9)


def without_gradients(step: int, about: Circumstances, *, loss: float) -> TrainingStopped:
    """Return the end of a run whose gradients have been zero for ZERO_STEPS, with the likely cause."""
    found = (
        f"nothing is learned: the gradients of {ZERO_STEPS} steps, up to step {step}, are all zero"
    )
    if not about.reached:
        cause = "no trained layer takes part in a step"
        fix = "train other adapter.targets; new tokens need data.trigger in the captions"
    elif loss < TINY_LOSS:
        cause = "no sample counts, as the weights of the loss are zero or vanish"
        fix = "widen objective.min_timestep and max_timestep, or use --set objective.weighting=none"
    elif about.loss_scale is not None:
        cause = f"they are too small for fp16 at a loss scale of {about.loss_scale:g}"
        fix = "use --set train.precision=bf16, or fp32"
    elif about.device == "mps":
        cause = "this torch loses them on Apple's MPS"
        fix = "use another release of torch, or --set hardware.device=cpu"
    else:
        cause = "the trained layers do not change what the base predicts"
        fix = "train other adapter.targets, and look whether the base draws samples at all"
    return TrainingStopped(f"{found}; likely cause: {cause}", fix=fix)


def without_movement(step: int, about: Circumstances) -> TrainingStopped:
    """Return the end of a run whose weights have not left zero by a step, with the likely cause."""
    found = f"nothing is learned: after {step} steps with gradients the adapter is as it began"
    if about.rate_sum < 1e-30:
        cause = f"the learning rate, {about.rate:g}, is zero to 32-bit weights"
        fix = "use --set optimizer.learning_rate=1e-4, or leave it out for the preset's"
    elif about.device == "mps":
        cause = "this torch does not update weights on Apple's MPS"
        fix = "use another release of torch, or --set hardware.device=cpu"
    else:
        cause = "the optimizer does not change its weights"
        fix = "use --set optimizer.name=adamw; if it is that already, please report it"
    return TrainingStopped(f"{found}; likely cause: {cause}", fix=fix)


def without_effect(step: int, about: Circumstances, *, change: float) -> TrainingStopped:
    """Return the end of a run whose losses have not moved by a step, with the likely cause."""
    found = (
        f"nothing is learned: {step} steps have changed the loss of no noise level, and by the end none "
        f"will have changed by more than {100 * change:.2g} %"
    )
    if about.alpha_over_rank < 0.01:
        cause = (
            f"the update counts {about.alpha_over_rank:g} times, adapter.alpha over adapter.rank"
        )
        fix = "leave adapter.alpha out: it is then the rank"
    else:
        cause = f"the learning rate, {about.rate:g}, is far too low"
        fix = "raise optimizer.learning_rate a hundredfold, or leave it out for the preset's"
    return TrainingStopped(f"{found}; likely cause: {cause}", fix=fix)
