"""The guards' state machine: when it counts, when it halves, when it goes back, when it gives up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import TrainingStopped
from lora_trainer.training.guards import (
    FIRST_PATIENCE_STEPS,
    MAX_PATIENCE_STEPS,
    MAX_ROLLBACKS,
    MAX_SKIPPED_IN_ROW,
    Change,
    GuardState,
    LossTrend,
    Plateau,
    Unstable,
    after_fitting,
    after_out_of_memory,
    after_rollback,
    after_step,
    after_torn_step,
    after_training_loss,
    after_validation,
    changes,
    from_plain,
    to_plain,
)

START = GuardState(micro_batch=8)


def test_a_finite_step_changes_nothing() -> None:
    assert after_step(START, finite=True, step=1) == START


def test_a_finite_step_ends_a_row_but_not_the_count() -> None:
    state = GuardState(micro_batch=2, skipped_in_row=3, skipped=7)
    assert after_step(state, finite=True, step=9) == GuardState(micro_batch=2, skipped=7)


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
        assert state.skipped == text[:number].count("x")
        assert state.micro_batch == START.micro_batch
    assert MAX_SKIPPED_IN_ROW == 5


# ---- going back


def test_going_back_halves_the_rate_and_keeps_what_was_learned_on_the_way() -> None:
    good = GuardState(micro_batch=8, lr_scale=0.5, skipped=1, trend=LossTrend(count=4))
    bad = GuardState(
        micro_batch=2, skipped=6, skipped_in_row=5, lr_scale=0.5, trend=LossTrend(count=9)
    )
    assert after_rollback(good, Unstable("x", bad)) == GuardState(
        micro_batch=2, lr_scale=0.25, skipped=6, rollbacks=1, trend=LossTrend(count=4)
    )


def test_each_time_is_lower_than_the_last_even_from_the_same_state() -> None:
    state, rates = START, []
    for _ in range(MAX_ROLLBACKS):
        state = after_rollback(START, Unstable("x", state))
        rates.append(state.lr_scale)
    assert rates == [0.5, 0.25, 0.125]
    with pytest.raises(TrainingStopped, match="3 times.*last good values") as caught:
        after_rollback(START, Unstable("the gradients were nan", state))
    assert "learning_rate" in caught.value.fix


# ---- spikes and plateaus


def test_losses_that_jump_tighten_the_clipping_three_times_at_most() -> None:
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


def test_a_plateau_halves_the_rate_three_times_at_most() -> None:
    state = after_validation(START, 1.0)
    rates = []
    for _ in range(20):
        state = after_validation(state, 1.0)
        rates.append(state.lr_scale)
    assert rates[:3] == [1.0, 1.0, 0.5]
    assert min(rates) == rates[-1] == 0.125
    assert state.clip_scale == 1.0


def test_changes_are_told_once_and_only_real_ones() -> None:
    lower = replace(START, lr_scale=0.5, micro_batch=4)
    assert list(changes(START, lower, reason="r")) == [
        Change(key="optimizer.learning_rate factor", old=1.0, new=0.5, reason="r")
    ]
    (tighter,) = changes(START, replace(START, clip_scale=0.25), reason="r")
    assert (tighter.key, tighter.new) == ("train.max_grad_norm factor", 0.25)
    assert not list(changes(lower, lower, reason="r"))


def test_a_state_survives_as_plain_values() -> None:
    state = GuardState(
        micro_batch=3,
        skipped=2,
        skipped_in_row=1,
        rollbacks=1,
        lr_scale=0.5,
        clip_scale=0.25,
        trend=LossTrend(count=5, mean=-2.5, variance=0.1, recent=-2.0, quiet=3),
        plateau=Plateau(best=0.125, stale=2),
    )
    assert from_plain(json.loads(json.dumps(to_plain(state)))) == state


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


def test_at_one_image_each_remedy_is_taken_once() -> None:
    state = GuardState(micro_batch=1)
    for taken in (1, 2):
        state = after_out_of_memory(state, images=1, remedies=2)
        assert (state.remedies, state.micro_batch) == (taken, 1)
    with pytest.raises(TrainingStopped, match=r"one image at a time and every remedy") as caught:
        after_out_of_memory(state, images=1, remedies=2)
    assert "data.resolution" in caught.value.fix


@pytest.mark.parametrize(("cap", "images"), [(1, 4), (4, 1), (1, 1)])
def test_out_of_memory_with_one_image_and_no_remedy_is_the_end(cap: int, images: int) -> None:
    with pytest.raises(TrainingStopped, match="one image at a time"):
        after_out_of_memory(GuardState(micro_batch=cap), images=images, remedies=0)


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


def test_a_torn_step_keeps_what_was_learned_about_memory_alone() -> None:
    good = GuardState(micro_batch=4, skipped=1, lr_scale=0.5)
    torn = GuardState(micro_batch=2, remedies=1, skipped=2, patience_steps=100, fitting_steps=3)
    assert after_torn_step(good, torn) == GuardState(
        micro_batch=2, remedies=1, patience_steps=100, fitting_steps=3, skipped=1, lr_scale=0.5
    )
