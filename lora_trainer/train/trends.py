"""Detects from the losses alone that the training loss jumps or that the validation loss stops falling.

Inputs are the training loss of each step and the validation losses; outputs are the next state and
whether a guard must react. Pure functions over small values that are part of the resume state. Thresholds
are in standard deviations of the run's own losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WARMUP_LOSSES = 100
SLOW, FAST = 0.01, 0.1
"""Weights of a new loss in the slow and the fast running mean: horizons of 100 and of 10 steps."""
SPIKE_DEVIATIONS, SPIKE_FACTOR = 5.0, 2.0
OUTLIER_DEVIATIONS = 3.0
QUIET_STEPS = 20
PATIENCE = 3
MIN_IMPROVEMENT = 0.002


@dataclass(frozen=True, kw_only=True)
class LossTrend:
    """Running statistics of log(loss): slow `mean` and `variance`, fast mean `recent`.

    `quiet` counts down the steps after a jump in which no other jump is reported. The logarithm makes a
    jump a factor, whatever the scale of the losses.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    recent: float = 0.0
    quiet: int = 0


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """The best validation loss, and the number of validations since then that were not clearly better."""

    best: float | None = None
    stale: int = 0


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest validation loss of a trained adapter, its step, and the number of validations since."""

    loss: float | None = None
    step: int = 0
    stale: int = 0


def after_validated(best: Best, loss: float, *, step: int) -> Best:
    """Return the state after a validation loss; step 0, the untouched base, is no adapter and is ignored."""
    if step == 0:
        return best
    if math.isfinite(loss) and (best.loss is None or loss < best.loss):
        return Best(loss=loss, step=step)
    return replace(best, stale=best.stale + 1)


def after_loss(trend: LossTrend, loss: float) -> tuple[LossTrend, bool]:
    """Return the trend after a finite training loss, and whether the loss has just jumped.

    At a jump the fast (geometric) mean is more than twice the slow mean, and more than five standard
    deviations of such a fast mean above it. A single hard timestep is no jump; a divergence is one within
    a few steps.
    """
    value = math.log(max(loss, 1e-12))
    if trend.count == 0:
        return LossTrend(count=1, mean=value, recent=value), False
    # A plain average at first: with the weight 0.01 the first loss would count for most of 100 steps.
    slow = max(SLOW, 1 / (trend.count + 1))
    difference = value - trend.mean
    # Outliers are clamped, because a jump that raised the variance would hide itself.
    if trend.count >= WARMUP_LOSSES:
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
    # The variance of an exponential mean with weight w is w / (2 - w) times that of one value.
    deviation = math.sqrt(trend.variance * FAST / (2 - FAST))
    limit = max(math.log(SPIKE_FACTOR), SPIKE_DEVIATIONS * deviation)
    if trend.recent - trend.mean <= limit:
        return trend, False
    return replace(trend, recent=trend.mean, quiet=QUIET_STEPS), True


def after_validation_loss(plateau: Plateau, loss: float) -> tuple[Plateau, bool]:
    """Return the plateau after a validation loss, and whether the loss has just stopped falling.

    It has after PATIENCE validations without an improvement of MIN_IMPROVEMENT; then counting restarts.
    """
    if not math.isfinite(loss):
        return plateau, False
    if plateau.best is None or loss < plateau.best * (1 - MIN_IMPROVEMENT):
        return Plateau(best=loss), False
    if plateau.stale + 1 < PATIENCE:
        return replace(plateau, stale=plateau.stale + 1), False
    return replace(plateau, stale=0), True
