"""Jumps and plateaus of losses: noise is none, divergence is one soon, a slow fall is none."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.training.guards import (
    PATIENCE,
    QUIET_STEPS,
    WARMUP_LOSSES,
    LossTrend,
    Plateau,
    after_loss,
    after_validation_loss,
)


def jumps(losses: Iterable[float]) -> list[int]:
    """Return at which losses a jump was seen."""
    trend, found = LossTrend(), []
    for index, loss in enumerate(losses):
        trend, jumped = after_loss(trend, loss)
        if jumped:
            found.append(index)
    return found


def noisy(count: int, *, deviation: float, seed: int, factor: float = 1.0) -> list[float]:
    """Return losses as diffusion gives them: spread by their timesteps over an order of magnitude."""
    draw = random.Random(seed)
    return [factor * math.exp(draw.gauss(-2.0, deviation)) for _ in range(count)]


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0, 1.5])
def test_noise_is_no_jump(deviation: float) -> None:
    assert jumps(noisy(20_000, deviation=deviation, seed=1)) == []


def test_one_hard_sample_is_no_jump() -> None:
    losses = noisy(400, deviation=0.8, seed=2)
    losses[300] *= 30
    assert jumps(losses) == []


@pytest.mark.parametrize(("deviation", "factor", "within"), [(0.3, 4, 15), (0.8, 20, 15)])
def test_divergence_is_seen_within_steps(deviation: float, factor: float, within: int) -> None:
    losses = noisy(300, deviation=deviation, seed=3)
    found = jumps(losses + noisy(60, deviation=deviation, seed=4, factor=factor))
    assert found
    assert 300 <= found[0] <= 300 + within


def test_after_a_jump_it_is_quiet_for_a_while() -> None:
    found = jumps([0.1] * 200 + [10.0] * 60)
    assert found
    assert all(b - a >= QUIET_STEPS for a, b in zip(found, found[1:], strict=False))


def test_nothing_is_judged_before_there_is_something_to_compare_with() -> None:
    assert jumps([0.1] * 20 + [50.0] * (WARMUP_LOSSES - 20)) == []


def test_falling_losses_are_no_jump() -> None:
    assert jumps([10.0 * 0.99**k for k in range(1000)]) == []


def test_zero_is_a_loss_too() -> None:
    trend, jumped = after_loss(LossTrend(), 0.0)
    assert math.isfinite(trend.mean)
    assert not jumped


@given(st.lists(st.floats(0, 1e30), max_size=200))
def test_any_losses_leave_finite_statistics(losses: list[float]) -> None:
    trend = LossTrend()
    for loss in losses:
        trend, _ = after_loss(trend, loss)
    assert all(map(math.isfinite, (trend.mean, trend.variance, trend.recent)))
    assert trend.variance >= 0
    assert trend.count == len(losses)


# ---- plateaus


def plateaus(losses: Iterable[float]) -> list[int]:
    state, found = Plateau(), []
    for index, loss in enumerate(losses):
        state, reached = after_validation_loss(state, loss)
        if reached:
            found.append(index)
    return found


def test_patience_counts_from_the_best() -> None:
    assert PATIENCE == 3
    assert plateaus([1.0, 0.9, 0.95, 0.9, 0.91]) == [4]
    assert plateaus([1.0, 1.0, 1.0, 0.9, 0.9, 0.9]) == []
    assert plateaus([1.0] * 8) == [3, 6]


def test_a_fall_within_the_noise_is_none() -> None:
    assert plateaus([1.0, 0.9999, 0.9998, 0.9997]) == [3]
    assert plateaus([1.0, 0.99, 0.98, 0.97, 0.96]) == []


def test_no_number_is_no_validation() -> None:
    assert plateaus([1.0, math.nan, math.inf, math.nan, math.nan]) == []
