"""Whether the loss jumps or has stopped falling, from the losses alone.

Inputs are the training loss of each step and the validation losses, outputs the next state and
whether something must be done about it. Pure functions over small values that travel in the resume
state; the thresholds are in standard deviations of the run's own losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WARMUP_LOSSES = 100
SLOW, FAST = 0.01, 0.1
"""Weights of a new loss in the two running means: horizons of 100 and of 10 steps."""
SPIKE_DEVIATIONS, SPIKE_FACTOR = 5.0, 2.0
OUTLIER_DEVIATIONS = 3.0
QUIET_STEPS = 20
PATIENCE = 3
MIN_IMPROVEMENT = 0.002


@dataclass(frozen=True, kw_only=True)
class LossTrend:
    """Running statistics of log(loss): the slow mean and variance, and the fast mean."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    recent: float = 0.0
    quiet: int = 0


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """The best validation loss, and how many have come since without a better one."""

    best: float | None = None
    stale: int = 0


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest validation loss of a trained adapter, its step, and how many validations came since."""

    loss: float | None = None
    step: int = 0
    stale: int = 0


def after_validated(best: Best, loss: float, *, step: int) -> Best:
    """Take in the validation loss of a step; the untouched base, step 0, is no adapter to keep."""
    if step == 0:
        return best
    if math.isfinite(loss) and (best.loss is None or loss < best.loss):
        return Best(loss=loss, step=step)
    return replace(best, stale=best.stale + 1)


def after_loss(trend: LossTrend, loss: float) -> tuple[LossTrend, bool]:
    """Take in a finite training loss; return the trend and whether it has just jumped.

    A jump is a fast mean twice the slow one (as a geometric mean) and five standard deviations of a
    mean of that horizon above it: single hard timesteps are none, a divergence is one within steps.
    """
    value = math.log(max(loss, 1e-12))
    if trend.count == 0:
        return LossTrend(count=1, mean=value, recent=value), False
    slow = max(SLOW, 1 / (trend.count + 1))
    difference = value - trend.mean
    if trend.count >= WARMUP_LOSSES:  # what jumps must not widen what it is measured by
        most = max(math.log(SPIKE_FACTOR), OUTLIER_DEVIATIONS * math.sqrt(trend.variance))
        difference = max(-most, min(most, difference))
    trend = LossTrend(
        count=trend.count + 1,
        mean=trend.mean + slow * difference,
        variance=(1 - slow) * (trend.variance + slow * difference * difference),
        recent=trend.recent + FAST * (value - trend.recent),
        quiet=max(0, trend.quiet - 1),
    )
    if trend.count <= WARMUP_LOSSES or trend.quiet:
        return trend, False
    deviation = math.sqrt(trend.variance * FAST / (2 - FAST))
    limit = max(math.log(SPIKE_FACTOR), SPIKE_DEVIATIONS * deviation)
    if trend.recent - trend.mean <= limit:
        return trend, False
    return replace(trend, recent=trend.mean, quiet=QUIET_STEPS), True


def after_validation_loss(plateau: Plateau, loss: float) -> tuple[Plateau, bool]:
    """Take in a validation loss; return the plateau and whether patience has just run out."""
    if not math.isfinite(loss):
        return plateau, False
    if plateau.best is None or loss < plateau.best * (1 - MIN_IMPROVEMENT):
        return Plateau(best=loss), False
    if plateau.stale + 1 < PATIENCE:
        return replace(plateau, stale=plateau.stale + 1), False
    return replace(plateau, stale=0), True
