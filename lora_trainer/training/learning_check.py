"""Three checks that a training learns at all: its gradients, its weights, and its loss per noise level.

Pure functions over small values that are part of the resume state. None of the checks judges how well a
run learns, and none can be fooled by noise: a gradient norm that is exactly zero, weights that are still
exactly zero, and losses of the same images with the same noise that have not changed. A run that learns
anything, however slowly, passes all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_trainer.common.errors import TrainingStopped

ZERO_STEPS = 25
"""Steps in a row with zero gradients that end a run, and the step by which weights must have left zero."""
LOOK_IMAGES, LOOK_STEPS, LOOK_SHARE = 200, 50, 0.2
"""The losses are compared after at least so many images, so many steps, and this share of the run's steps."""
TINY_LOSS = 1e-20
"""Below it gradients vanish from 32-bit sums of squares."""
LEAST_CHANGE = 3e-4
"""Least relative change of the loss at some noise level by the end of the run, extrapolated: below it the
run learns nothing."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Steps in a row with zero gradients; `base` holds the losses by noise level before the first step."""

    zero_gradients: int = 0
    base: Sequence[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LearningContext:
    """The facts from which the cause is guessed when a run learns nothing.

    `rate` is the highest learning rate, `rate_sum` the sum of the rates of the steps so far; `loss_scale`
    is that of fp16, None without. `reached` is true if some trained parameter had a gradient.
    """

    device: str
    rate: float
    rate_sum: float
    loss_scale: float | None
    reached: bool = True
    alpha_over_rank: float = 1.0


def look_step(*, steps: int, batch_size: int) -> int | None:
    """Return the step at which losses are compared with those before step 1; None in a short run."""
    step = max(LOOK_STEPS, -(-LOOK_IMAGES // batch_size), round(LOOK_SHARE * steps))
    # Later than half-way there is little left to save by stopping.
    return step if 2 * step <= steps else None


def after_gradient(learning: Learning, *, norm: float) -> Learning:
    """Return the state after the finite gradient norm of a step, before clipping."""
    # Exactly 0: however small, the gradient of a layer that takes part is a number other than 0.
    if norm != 0.0:
        return replace(learning, zero_gradients=0) if learning.zero_gradients else learning
    return replace(learning, zero_gradients=learning.zero_gradients + 1)


def least_change(base: Sequence[float], now: Sequence[float], *, so_far: float) -> float:
    """Return the relative change by the end of the run of the loss that changes most, extrapolated.

    `base` and `now` are losses by noise level. `so_far` is the sum of the learning rates until now as a
    share of the run's: while an adapter is small, its effect grows in proportion to that sum.
    """
    # By level and relative: losses of little noise are many times those of much, and would hide them in a sum.
    changes = [abs(new - old) / old for old, new in zip(base, now, strict=True) if old > 0]
    return max(changes, default=0.0) / max(so_far, 1e-9)


def without_gradients(step: int, about: LearningContext, *, loss: float) -> TrainingStopped:
    """Return the error of a run whose gradients have been zero for ZERO_STEPS, with the likely cause."""
    symptom = (
        f"nothing is learned: the gradients of {ZERO_STEPS} steps, up to step {step}, are all zero"
    )
    if not about.reached:
        cause = "no trained layer takes part in a step"
        fix = "train other adapter.targets; new tokens need data.trigger in the captions"
    elif loss < TINY_LOSS:
        cause = "no sample counts, as the weights of the loss are zero or vanish"
        fix = "widen objective.min_timestep and objective.max_timestep, or use --set objective.weighting=none"
    elif about.loss_scale is not None:
        cause = f"they are too small for fp16 at a loss scale of {about.loss_scale:g}"
        fix = "use --set train.precision=bf16, or fp32"
    elif about.device == "mps":
        cause = "this torch loses them on Apple's MPS"
        fix = "use another release of torch, or --set hardware.device=cpu"
    else:
        cause = "the trained layers do not change what the base predicts"
        fix = (
            "train other adapter.targets, and check that the base alone makes usable sample images"
        )
    return TrainingStopped(f"{symptom}; likely cause: {cause}", fix=fix)


def without_movement(step: int, about: LearningContext) -> TrainingStopped:
    """Return the error of a run whose weights are still zero at a step, with the likely cause."""
    symptom = f"nothing is learned: after {step} steps with gradients the adapter is as it began"
    if about.rate_sum < 1e-30:
        cause = f"the learning rate, {about.rate:g}, is too small to change 32-bit weights"
        fix = "use --set optimizer.learning_rate=1e-4, or leave it out for the preset's"
    elif about.device == "mps":
        cause = "this torch does not update weights on Apple's MPS"
        fix = "use another release of torch, or --set hardware.device=cpu"
    else:
        cause = "the optimizer does not change its weights"
        fix = "use --set optimizer.name=adamw; if it is that already, please report it"
    return TrainingStopped(f"{symptom}; likely cause: {cause}", fix=fix)


def without_effect(step: int, about: LearningContext, *, change: float) -> TrainingStopped:
    """Return the error of a run whose losses have not changed by a step, with the likely cause."""
    symptom = (
        f"nothing is learned: after {step} steps the loss is as it was at the start, and the whole run "
        f"would change it by less than {max(0.01, 100 * change):.2g} %"
    )
    if about.alpha_over_rank < 0.01:
        cause = f"the adapter's update is scaled by only {about.alpha_over_rank:g} (adapter.alpha / adapter.rank)"
        fix = "leave adapter.alpha out; it then equals adapter.rank"
    else:
        cause = f"the learning rate, {about.rate:g}, is far too low"
        fix = "leave optimizer.learning_rate out for the preset's, which suits most images"
    return TrainingStopped(f"{symptom}; likely cause: {cause}", fix=fix)
