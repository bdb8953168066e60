"""The guards of a training as a pure state machine: out of memory, bad gradients, plateaus, no learning.

No torch, no clock, no files: the loop reports an event and gets the next state back. The state is part of
the resume state, so a resumed run decides as the uninterrupted run would have. Steps with non-finite
gradients are skipped; after five in a row training goes back to the last good state at half the learning
rate; after three such rollbacks it stops. A validation loss that has stopped falling lowers the learning rate
where the settings ask for it.

Three checks say whether the run learns at all: a gradient norm that is exactly zero, weights that are still
exactly zero, and losses of the same images with the same noise that have not changed. None can be fooled by
noise: a run that learns anything, however slowly, passes all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lora_trainer.common.errors import InputError, TrainingStopped


@dataclass(frozen=True, kw_only=True)
class BestValidation:
    """The lowest validation loss of a trained adapter, its step, and the number of validations since."""

    loss: float | None = None
    step: int = 0
    stale: int = 0


# A validation loss is clearly lower than another if it is below it by more than this share: validations use the same
# images, timesteps and noise each time, so smaller differences are not chance, but they are not worth waiting for.
# A LoRA is worse than its base from the same share above it.
CLEARLY_LOWER = 0.002
# The learning rate is not lowered for a plateau below this share of the schedule's rate.
LOWEST_SCALE = 0.01


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """The validation loss to improve on, and the number of validations since that were not clearly lower."""

    best: float | None = None
    stale: int = 0


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Steps in a row with zero gradients; `base` holds the losses by noise level after step BASE_STEP."""

    zero_gradients: int = 0
    base: Sequence[float] = field(default_factory=list)

    def after_gradient(self, norm: float) -> Learning:
        """Return the state after the finite gradient norm of a step, before clipping."""
        # Exactly 0: however small, the gradient of a layer that takes part is a number other than 0.
        return replace(self, zero_gradients=0 if norm else self.zero_gradients + 1)

    def least_change(self, losses: Sequence[float], *, so_far: float) -> float:
        """Return the relative change by the end of the run of the loss that changes most, extrapolated.

        `losses` are those of the base's noise levels now. `so_far` is the sum of the learning rates since
        then as a share of the run's: while an adapter is small, its effect grows in proportion to that sum.
        """
        # By level and relative: losses of little noise are many times those of much, and would hide them in a sum.
        pairs = zip(self.base, losses, strict=True)
        changes = [abs(new - old) / old for old, new in pairs if old > 0]
        return max(changes, default=0.0) / max(so_far, 1e-9)


# Steps that must fit before a larger micro-batch is tried again; each out of memory doubles them.
#
# Without the doubling a device that is full now and then would be filled again every 50 steps.
FIRST_PATIENCE_STEPS, MAX_PATIENCE_STEPS = 50, 3200
MAX_SKIPPED_IN_ROW = 5
MAX_ROLLBACKS = 3
LOWER_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """The memory and the decisions of the guards; written to the resume state by `asdict`.

    `micro_batch` is the present cap in images, `remedies` the number of out-of-memory remedies in force,
    `plain` whether the run is on the plain way after an error, `uncompiled` whether compiling has failed.
    `lr_scale` is a factor on the learning rate. The counters count steps that fitted, non-finite steps and
    rollbacks.
    """

    micro_batch: int
    remedies: int = 0
    plain: bool = False
    uncompiled: bool = False
    fitting_steps: int = 0
    patience_steps: int = FIRST_PATIENCE_STEPS
    skipped_in_row: int = 0
    rollbacks: int = 0
    lr_scale: float = 1.0
    plateau: Plateau = Plateau()
    best: BestValidation = BestValidation()
    learning: Learning = Learning()

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> GuardState:
        """Return the guard state of its fields as plain values; groups that an older state lacks are as new.

        Values that only older versions had (`ungraphed`, `trend`, `skipped`) are ignored.
        """
        current = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        current["plateau"] = Plateau(**values.get("plateau", {}))
        current["best"] = BestValidation(**values.get("best", {}))
        return cls(**current | {"learning": Learning(**values.get("learning", {}))})

    def after_step(self, *, finite: bool, step: int, start: str | None = None) -> GuardState:
        """Count a step with non-finite gradients; raises Unstable after MAX_SKIPPED_IN_ROW in a row.

        `start` is the file that the adapter began with, None for one that changes nothing at its start. Where every
        step of the run was skipped no weight has moved: no lower rate can help, and it is an InputError.
        """
        if finite:
            return replace(self, skipped_in_row=0)
        state = replace(self, skipped_in_row=self.skipped_in_row + 1)
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW and state.skipped_in_row >= step:
            raise broken_start(step, file=start)
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
            raise Unstable(
                f"the gradients were not finite numbers {state.skipped_in_row} steps in a row, "
                f"up to step {step}",
                state,
            )
        return state

    def with_best(self, loss: float, *, step: int) -> GuardState:
        """Return the state after the validation loss of a step, counted as the lowest so far or as no better."""
        best = self.best
        if step == 0:  # the untouched base is not an adapter
            return self
        if math.isfinite(loss) and (best.loss is None or loss < best.loss):
            return replace(self, best=BestValidation(loss=loss, step=step))
        return replace(self, best=replace(best, stale=best.stale + 1))

    def after_validation(self, loss: float, *, patience: int, lower_to: float) -> GuardState:
        """Return the state after a validation loss; a plateau of `patience` validations lowers the learning rate.

        The factor on the rate is then multiplied by `lower_to`, and counting begins again.
        """
        # A loss that is not finite is not a plateau; the guard of the gradients answers to it.
        if not math.isfinite(loss):
            return self
        best, stale = self.plateau.best, self.plateau.stale + 1
        if best is None or loss < best * (1 - CLEARLY_LOWER):
            return replace(self, plateau=Plateau(best=loss))
        if stale < patience:
            return replace(self, plateau=replace(self.plateau, stale=stale))
        # A rollback may have lowered the factor further than a plateau would: that is kept.
        lowered = max(self.lr_scale * lower_to, min(self.lr_scale, LOWEST_SCALE))
        return replace(self, plateau=replace(self.plateau, stale=0), lr_scale=lowered)

    def after_going_back(self, failed: GuardState) -> GuardState:
        """Return the state to continue with from this one, the last whose weights are whole."""
        # Facts about the machine stay: going back undoes the weights, but the same micro-batch would not fit this
        # time either.
        return replace(
            failed,
            learning=replace(failed.learning, zero_gradients=0),
            skipped_in_row=self.skipped_in_row,
            rollbacks=self.rollbacks,
            lr_scale=self.lr_scale,
            plateau=self.plateau,
            best=self.best,
        )

    def after_rollback(self, unstable: Unstable) -> GuardState:
        """Go back to this state and halve the learning rate; raises TrainingStopped after MAX_ROLLBACKS."""
        bad = unstable.state
        if bad.rollbacks >= MAX_ROLLBACKS:
            raise unstable.stopped(f" {bad.rollbacks} times at ever lower learning rates")
        return replace(
            self.after_going_back(bad),
            skipped_in_row=0,
            rollbacks=bad.rollbacks + 1,
            lr_scale=min(self.lr_scale, bad.lr_scale) * LOWER_RATE,
        )

    def after_out_of_memory(self, *, images: int, remedies: int) -> GuardState:
        """Halve the micro-batch after a pass of `images` did not fit; at one image, apply one more remedy.

        `remedies` is the number of remedies the run has. Raises NoFallbackLeft when all are in force.
        """
        state = replace(
            self,
            fitting_steps=0,
            patience_steps=min(2 * self.patience_steps, MAX_PATIENCE_STEPS),
        )
        # The cap may be larger than the pass that failed (few images of one shape in a batch, or a smaller cap
        # for large images); halving the cap alone would repeat the same pass.
        largest = min(self.micro_batch, images)
        if largest > 1:
            return replace(state, micro_batch=(largest + 1) // 2)
        if self.remedies < remedies:
            return replace(state, micro_batch=1, remedies=self.remedies + 1)
        raise NoFallbackLeft(
            "the device ran out of memory with one image at a time and every remedy applied",
            fix="use a lower data.resolution, a smaller adapter.rank, or free memory on the device",
            guard=replace(state, micro_batch=1),
        )

    def after_fitting(self, *, planned: int) -> GuardState:
        """Count a step that fitted; after enough of them double the micro-batch, up to `planned`."""
        if self.micro_batch >= planned:
            return self
        if self.fitting_steps + 1 < self.patience_steps:
            return replace(self, fitting_steps=self.fitting_steps + 1)
        return replace(self, micro_batch=min(planned, 2 * self.micro_batch), fitting_steps=0)


def broken_start(steps: int, *, file: str | None) -> InputError:
    """Return the error of a run whose every step so far was skipped, so that no weight has moved.

    `file` is the one that the adapter began with, None for an adapter that changes nothing at its start.
    """
    symptom = f"the losses or gradients are not finite numbers from the first step on ({steps} of {steps} steps)"
    precision = "with train.precision=fp16 use bf16 or fp32"
    if file is None:
        return InputError(
            f"{symptom}, where the adapter changes nothing yet: the weights of the base are damaged, or too large "
            "for the precision",
            fix=f"download the base again and compare its hash; {precision}",
        )
    return InputError(
        f"{symptom}, starting from {file}: the values of this file are too large, it belongs to another base, or "
        "the base is damaged",
        fix=f"start without train.init_from: if that trains, use an earlier save of the file; {precision}",
    )


class Unstable(Exception):
    """Asks the loop to go back to the last good state, for `reason`; `state` is the guard state then."""

    def __init__(self, reason: str, state: GuardState) -> None:
        super().__init__(reason)
        self.reason = reason
        self.state = state

    def stopped(self, remedies: str = "") -> TrainingStopped:
        """Return the error that ends an unstable training after all remedies."""
        return TrainingStopped(
            f"{self.reason}{remedies}; the adapter still holds its last good values",
            fix="lower optimizer.learning_rate, or use --set train.precision=fp32, and resume",
        )


class NoFallbackLeft(TrainingStopped):
    """A step cannot be computed; `guard` remembers the answers that were tried, for a resume."""

    def __init__(self, found: str, *, fix: str, guard: GuardState) -> None:
        super().__init__(found, fix=fix)
        self.guard = guard


# ---- whether the run learns at all

# Steps in a row with zero gradients that end a run, and the step by which weights must have left zero.
ZERO_STEPS = 25
# The losses are compared with those after this step, and not with those before it: a run then comes to its first step
# a second sooner. A first step moves them by next to nothing; states of older versions hold those before it.
BASE_STEP = 1
# They are compared after at least so many images, so many steps, and this share of the run's steps.
LOOK_IMAGES, LOOK_STEPS, LOOK_SHARE = 200, 50, 0.2
# Below it gradients vanish from 32-bit sums of squares.
TINY_LOSS = 1e-20
_NOT_MPS = "use another release of torch, or --set hardware.device=cpu"


def look_step(*, steps: int, batch_size: int) -> int | None:
    """Return the step at which losses are compared with those of BASE_STEP; None in a short run."""
    step = max(LOOK_STEPS, -(-LOOK_IMAGES // batch_size), round(LOOK_SHARE * steps))
    # Later than half-way there is little left to save by stopping.
    return step if 2 * step <= steps else None


def no_gradients(
    step: int, *, loss: float, device: str, loss_scale: float | None, reached: bool
) -> TrainingStopped:
    """Return the error of a run whose gradients have been zero for ZERO_STEPS, with its likely cause.

    `loss_scale` is that of fp16, None without. `reached` is true if some trained parameter had a gradient.
    """
    symptom = f"the gradients of {ZERO_STEPS} steps, up to step {step}, are all zero"
    if not reached:
        cause = "no trained layer takes part in a step"
        fix = "train other adapter.targets; new tokens need data.trigger in the captions"
    elif loss < TINY_LOSS:
        cause = "no sample counts, as the weights of the loss are zero or vanish"
        fix = "widen objective.min_timestep and objective.max_timestep, or use --set objective.weighting=none"
    elif loss_scale is not None:
        cause = f"they are too small for fp16 at a loss scale of {loss_scale:g}"
        fix = "use --set train.precision=bf16, or fp32"
    elif device == "mps":
        cause, fix = "this torch loses them on Apple's MPS", _NOT_MPS
    else:
        cause = "the trained layers do not change what the base predicts"
        fix = "train other adapter.targets, and check that the base alone makes usable images"
    return _nothing_learned(symptom, cause, fix)


def no_movement(step: int, *, rate: float, rate_sum: float, device: str) -> TrainingStopped:
    """Return the error of a run whose weights are still zero at a step, with its likely cause.

    `rate` is the highest learning rate, `rate_sum` the sum of the rates of the steps so far.
    """
    symptom = f"after {step} steps with gradients the adapter is as it began"
    if rate_sum < 1e-30:
        cause = f"the learning rate, {rate:g}, is too small to change 32-bit weights"
        fix = "use --set optimizer.learning_rate=1e-4, or leave it out for the preset's"
    elif device == "mps":
        cause, fix = "this torch does not update weights on Apple's MPS", _NOT_MPS
    else:
        cause = "the optimizer does not change its weights"
        fix = "use --set optimizer.name=adamw; if it is that already, please report it"
    return _nothing_learned(symptom, cause, fix)


def no_effect(step: int, *, change: float, rate: float, alpha_over_rank: float) -> TrainingStopped:
    """Return the error of a run whose losses have not changed by a step, with its likely cause."""
    symptom = (
        f"after {step} steps the loss is as it was at the start, and the whole run would change it by "
        f"less than {max(0.01, 100 * change):.2g} %"
    )
    if alpha_over_rank < 0.01:
        cause = f"the adapter's update is scaled by only {alpha_over_rank:g} (adapter.alpha / adapter.rank)"
        fix = "leave adapter.alpha out; it then equals adapter.rank"
    else:
        cause = f"the learning rate, {rate:g}, is far too low"
        fix = "leave optimizer.learning_rate out for the preset's, which suits most images"
    return _nothing_learned(symptom, cause, fix)


def _nothing_learned(symptom: str, cause: str, fix: str) -> TrainingStopped:
    return TrainingStopped(f"nothing is learned: {symptom}; likely cause: {cause}", fix=fix)
