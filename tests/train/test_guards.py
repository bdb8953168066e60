"""The guards' state machine: when it counts, halves, goes back and gives up, and when nothing is learned."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import TrainingStopped
from lora_trainer.training.guards import (
    FIRST_PATIENCE_STEPS,
    MAX_PATIENCE_STEPS,
    QUIET_STEPS,
    WARMUP_LOSSES,
    BestValidation,
    GuardState,
    Learning,
    LearningContext,
    LossTrend,
    Plateau,
    Unstable,
    after_fitting,
    after_going_back,
    after_gradient,
    after_out_of_memory,
    after_rollback,
    after_step,
    after_training_loss,
    after_validation,
    changes,
    from_plain,
    least_change,
    look_step,
    without_effect,
    without_gradients,
    without_movement,
)

START = GuardState(micro_batch=8)


@given(steps=st.lists(st.booleans(), max_size=60))
def test_it_is_unstable_at_the_fifth_in_a_row_and_never_before(steps: list[bool]) -> None:
    text = "".join("." if finite else "x" for finite in steps)
    state = START
    for number, finite in enumerate(steps, start=1):
        if text[:number].endswith("x" * 5):
            with pytest.raises(Unstable, match=f"5 steps in a row, up to step {number}$") as caught:
                after_step(state, finite=finite, step=number)
            assert caught.value.state.skipped == text[:number].count("x")
            return
        state = after_step(state, finite=finite, step=number)
        row = len(text[:number]) - len(text[:number].rstrip("x"))
        expected = replace(START, skipped=text[:number].count("x"), skipped_in_row=row)
        assert state == expected


# ---- going back


def test_each_way_back_keeps_what_was_learned_and_is_slower_than_the_last() -> None:
    good = GuardState(micro_batch=8, lr_scale=0.5, skipped=1, trend=LossTrend(count=4))
    facts = {"micro_batch": 2, "remedies": 1, "plain": True, "uncompiled": True}
    facts |= {"fitting_steps": 3, "patience_steps": 100, "skipped": 6}
    failed = GuardState(
        **facts,  # type: ignore[arg-type]
        skipped_in_row=5,
        lr_scale=0.5,
        trend=LossTrend(count=9),
        learning=Learning(zero_gradients=3, base=[0.1, 1 / 3]),
    )
    back = replace(good, **facts, learning=Learning(base=[0.1, 1 / 3]))  # type: ignore[arg-type]
    assert after_going_back(good, failed) == back
    assert after_rollback(good, Unstable("x", failed)) == replace(back, lr_scale=0.25, rollbacks=1)
    state, rates = START, []
    for _ in range(3):
        state = after_rollback(START, Unstable("x", state))
        rates.append(state.lr_scale)
    assert rates == [0.5, 0.25, 0.125]
    with pytest.raises(TrainingStopped, match="3 times.*last good values") as caught:
        after_rollback(START, Unstable("the gradients were nan", state))
    assert "learning_rate" in caught.value.fix


def test_changes_are_told_once_and_only_real_ones() -> None:
    lower = replace(START, lr_scale=0.5, micro_batch=4)
    assert list(changes(START, lower)) == [("optimizer.learning_rate factor", 1.0, 0.5)]
    tighter = replace(START, clip_scale=0.25)
    assert list(changes(START, tighter)) == [("train.max_grad_norm factor", 1.0, 0.25)]
    assert not list(changes(lower, lower))


def test_a_state_survives_as_plain_values_and_older_ones_are_read() -> None:
    state = GuardState(
        micro_batch=3,
        skipped=2,
        skipped_in_row=1,
        rollbacks=1,
        lr_scale=0.5,
        clip_scale=0.25,
        trend=LossTrend(count=5, mean=-2.5, variance=0.1, recent=-2.0, quiet=3),
        plateau=Plateau(best=0.125, stale=2),
        best=BestValidation(loss=0.25, step=4, stale=1),
        learning=Learning(zero_gradients=3, base=[0.1, 1 / 3]),
    )
    assert from_plain(json.loads(json.dumps(asdict(state)))) == state
    older = {"micro_batch": 4, "ungraphed": True}  # of CUDA graphs, which are gone
    assert from_plain(older) == GuardState(micro_batch=4)


# ---- jumps of the loss


def jumps(losses: Iterable[float]) -> list[int]:
    """Return at which losses a jump was seen."""
    state, found = START, []
    for index, loss in enumerate(losses):
        new = after_training_loss(replace(state, clip_scale=1.0), loss)
        if new.clip_scale < 1.0:
            found.append(index)
        state = new
    return found


def noisy(count: int, *, deviation: float, seed: int, factor: float = 1.0) -> list[float]:
    """Return losses as diffusion gives them: spread by their timesteps over an order of magnitude."""
    draw = random.Random(seed)
    return [factor * math.exp(draw.gauss(-2.0, deviation)) for _ in range(count)]


def test_noise_hard_samples_and_falling_losses_are_no_jump() -> None:
    for deviation in (0.0, 0.3, 1.0, 1.5):
        assert jumps(noisy(20_000, deviation=deviation, seed=1)) == []
    losses = noisy(400, deviation=0.8, seed=2)
    losses[300] *= 30
    assert jumps(losses) == []
    assert jumps([10.0 * 0.99**k for k in range(1000)]) == []
    assert jumps([0.1] * 20 + [50.0] * (WARMUP_LOSSES - 20)) == [], "nothing to compare with yet"


@pytest.mark.parametrize(("deviation", "factor"), [(0.3, 4), (0.8, 20)])
def test_divergence_is_seen_within_steps(deviation: float, factor: float) -> None:
    losses = noisy(300, deviation=deviation, seed=3)
    found = jumps(losses + noisy(60, deviation=deviation, seed=4, factor=factor))
    assert 300 <= found[0] <= 315


def test_after_a_jump_it_is_quiet_and_the_clipping_is_tightened_three_times_at_most() -> None:
    found = jumps([0.1] * 200 + [10.0] * 60)
    assert found
    assert all(b - a >= QUIET_STEPS for a, b in zip(found, found[1:], strict=False))
    state, seen, loss = START, [1.0], 0.1
    for _ in range(150):
        state = after_training_loss(state, loss)
    assert state.clip_scale == 1.0
    for _ in range(6):
        loss *= 20  # ever higher, so that each level is a jump from the one before
        for _ in range(60):
            state = after_training_loss(state, loss)
            seen.append(state.clip_scale)
    assert sorted(set(seen), reverse=True) == [1.0, 0.5, 0.25, 0.125]
    assert seen == sorted(seen, reverse=True)
    assert state.lr_scale == 1.0


@given(st.lists(st.floats(0, 1e30), max_size=200))
def test_any_losses_leave_finite_statistics(losses: list[float]) -> None:
    state = START
    for loss in losses:
        state = after_training_loss(state, loss)
    trend = state.trend
    assert all(map(math.isfinite, (trend.mean, trend.variance, trend.recent)))
    assert trend.variance >= 0
    assert trend.count == len(losses)


# ---- plateaus


def plateaus(losses: Iterable[float]) -> list[int]:
    """Return at which validations the learning rate was halved."""
    state, found = START, []
    for index, loss in enumerate(losses):
        state = after_validation(replace(state, lr_scale=1.0), loss)
        if state.lr_scale < 1.0:
            found.append(index)
    return found


@pytest.mark.parametrize(
    ("losses", "halved"),
    [
        ([1.0, 0.9, 0.95, 0.9, 0.91], [4]),  # patience counts from the best
        ([1.0, 1.0, 1.0, 0.9, 0.9, 0.9], []),
        ([1.0] * 8, [3, 6]),
        ([1.0, 0.9999, 0.9998, 0.9997], [3]),  # a fall within the noise is none
        ([1.0, 0.99, 0.98, 0.97, 0.96], []),
        ([1.0, math.nan, math.inf, math.nan, math.nan], []),
    ],
)
def test_a_loss_that_stopped_falling_is_seen_after_three(
    losses: list[float], halved: list[int]
) -> None:
    assert plateaus(losses) == halved


def test_a_plateau_halves_the_rate_three_times_at_most() -> None:
    state = START
    for _ in range(20):
        state = after_validation(state, 1.0)
    assert (state.lr_scale, state.clip_scale) == (0.125, 1.0)


# ---- memory


@pytest.mark.parametrize(
    ("cap", "images", "smaller"), [(8, 8, 4), (8, 4, 2), (4, 8, 2), (5, 9, 3), (3, 3, 2), (2, 2, 1)]
)
def test_out_of_memory_halves_what_was_really_tried(cap: int, images: int, smaller: int) -> None:
    state = GuardState(micro_batch=cap, skipped_in_row=1, skipped=2, fitting_steps=7)
    assert after_out_of_memory(state, images=images, remedies=3) == GuardState(
        micro_batch=smaller,
        skipped_in_row=1,
        skipped=2,
        patience_steps=2 * FIRST_PATIENCE_STEPS,
    )


@pytest.mark.parametrize(("cap", "images"), [(1, 4), (4, 1), (1, 1)])
def test_at_one_image_each_remedy_is_taken_once(cap: int, images: int) -> None:
    state = GuardState(micro_batch=cap)
    for taken in (1, 2):
        state = after_out_of_memory(state, images=images, remedies=2)
        assert (state.remedies, state.micro_batch) == (taken, 1)
    with pytest.raises(TrainingStopped, match=r"one image at a time and every remedy") as caught:
        after_out_of_memory(state, images=images, remedies=2)
    assert "data.resolution" in caught.value.fix


@given(planned=st.integers(1, 64), fits=st.integers(1, 64))
def test_the_micro_batch_grows_back_ever_more_rarely(planned: int, fits: int) -> None:
    state, tries, steps = GuardState(micro_batch=planned), [], 20_000
    for step in range(steps):
        while state.micro_batch > fits:
            state = after_out_of_memory(state, images=state.micro_batch, remedies=0)
            tries.append(step)
        state = after_fitting(state, planned=planned)
        assert 1 <= state.micro_batch <= planned
    if fits >= planned:
        assert state == GuardState(micro_batch=planned), "nothing is counted where nothing is wrong"
        return
    assert state.micro_batch > fits / 2 or state.fitting_steps > 0
    assert state.patience_steps <= MAX_PATIENCE_STEPS
    assert len(tries) <= 7 * 6 + steps / MAX_PATIENCE_STEPS + 7, "failing costs ever less"


def test_it_grows_by_doubling_up_to_the_plan() -> None:
    state = GuardState(micro_batch=1, patience_steps=3)
    seen = []
    for _ in range(9):
        state = after_fitting(state, planned=3)
        seen.append(state.micro_batch)
    assert seen == [1, 1, 2, 2, 2, 3, 3, 3, 3]


# ---- when nothing is learned: exact zeros only, and losses that stay where they were


ABOUT = LearningContext(device="cpu", rate=1e-4, rate_sum=1e-2, loss_scale=None)


def test_only_zeros_in_a_row_count() -> None:
    learning = Learning(zero_gradients=7)
    assert after_gradient(learning, norm=0.0).zero_gradients == 8
    assert after_gradient(learning, norm=1e-30).zero_gradients == 0


@pytest.mark.parametrize(
    ("steps", "batch_size", "look"),
    [
        (1000, 1, 200),
        (399, 1, None),  # too short to be half-way after 200 images
        (400, 1, 200),
        (100, 4, 50),
        (99, 4, None),
        (5000, 1, 1000),
    ],
)
def test_a_look_takes_enough_images_steps_and_a_share_of_the_run(
    steps: int, batch_size: int, look: int | None
) -> None:
    assert look_step(steps=steps, batch_size=batch_size) == look


def test_the_noise_level_that_changed_most_counts_and_what_is_still_to_come() -> None:
    assert least_change([1.0, 0.5], [1.0, 0.5], so_far=0.2) == 0
    assert least_change([1.0, 0.5], [1.001, 0.45], so_far=1.0) == pytest.approx(0.1)
    assert least_change([1.0, 0.5], [1.0, 0.4999], so_far=0.1) == pytest.approx(2e-3)
    assert least_change([0.0], [0.0], so_far=1.0) == 0


@pytest.mark.parametrize(
    ("error", "cause", "setting"),
    [
        # zero gradients
        (
            without_gradients(25, replace(ABOUT, reached=False), loss=0.1),
            "no trained layer takes part",
            "adapter.targets",
        ),
        (without_gradients(25, ABOUT, loss=1e-25), "weights of the loss", "objective."),
        (
            without_gradients(25, replace(ABOUT, loss_scale=65536.0), loss=0.1),
            "fp16",
            "train.precision=bf16",
        ),
        (without_gradients(25, replace(ABOUT, device="mps"), loss=0.1), "MPS", "hardware.device"),
        (without_gradients(25, ABOUT, loss=0.1), "do not change what the base", "adapter.targets"),
        # weights that stay
        (
            without_movement(25, replace(ABOUT, rate=1e-50, rate_sum=0.0)),
            "1e-50, is too small",
            "optimizer.learning_rate",
        ),
        (without_movement(25, replace(ABOUT, device="mps")), "MPS", "hardware.device=cpu"),
        (without_movement(25, ABOUT), "optimizer does not change", "optimizer.name"),
        # losses that stay
        (
            without_effect(200, replace(ABOUT, rate=1e-9), change=1e-7),
            "1e-09, is far too low",
            "optimizer.learning_rate",
        ),
        (
            without_effect(200, replace(ABOUT, alpha_over_rank=1e-6), change=1e-7),
            "adapter.alpha",
            "adapter.alpha",
        ),
    ],
)
def test_a_run_that_learns_nothing_names_its_cause(
    error: TrainingStopped, cause: str, setting: str
) -> None:
    assert cause in error.found and "nothing is learned" in error.found
    assert setting in error.fix
    assert error.exit_code == 5
