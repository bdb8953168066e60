"""The guards' state machine: when it counts, halves, goes back and gives up, and when nothing is learned."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import InputError, TrainingStopped
from lora_trainer.training import guards

START = guards.GuardState(micro_batch=8)
SPOILT = {
    "plateau": {"best": 0.3, "stale": 1},
    "best": {"loss": 0.25, "step": 4, "stale": 1},
    "learning": {"zero_gradients": 3, "base": [0.1, 1 / 3]},
}


START_FILE = "old.safetensors"


@given(steps=st.lists(st.booleans(), max_size=60), start=st.sampled_from([None, START_FILE]))
def test_it_is_unstable_at_the_fifth_in_a_row_and_never_before(
    steps: list[bool], start: str | None
) -> None:
    text = "".join("." if finite else "x" for finite in steps)
    state = START
    for number, finite in enumerate(steps, start=1):
        if text[:number] == "x" * 5:  # no weight has moved: a lower rate changes nothing
            with pytest.raises(InputError, match="from the first step on") as refused:
                state.after_step(finite=finite, step=number, start=start)
            assert ("the weights of the base are damaged" in refused.value.found) == (start is None)
            assert (f"starting from {START_FILE}" in refused.value.found) == (start is not None)
            return
        if text[:number].endswith("x" * 5):
            with pytest.raises(
                guards.Unstable, match=f"5 steps in a row, up to step {number}$"
            ) as caught:
                state.after_step(finite=finite, step=number, start=start)
            assert caught.value.state.skipped_in_row == 5
            return
        state = state.after_step(finite=finite, step=number, start=start)
        row = len(text[:number]) - len(text[:number].rstrip("x"))
        assert state == replace(START, skipped_in_row=row)


def test_each_way_back_keeps_what_was_learned_and_is_slower_than_the_last() -> None:
    good = guards.GuardState(micro_batch=8, lr_scale=0.5)
    facts = {"micro_batch": 2, "remedies": 1, "plain": True, "uncompiled": True}
    facts |= {"fitting_steps": 3, "patience_steps": 100}
    counts = {"skipped_in_row": 5, "lr_scale": 0.5, "rollbacks": 1}
    failed = guards.GuardState.from_plain({**facts, **SPOILT, **counts})
    learning = replace(failed.learning, zero_gradients=0)
    back = replace(good, **facts, learning=learning)  # type: ignore[arg-type]  # facts of several types
    assert good.after_going_back(failed) == back
    assert good.after_rollback(guards.Unstable("x", failed)) == replace(
        back, lr_scale=0.25, rollbacks=2
    )
    state, rates = START, []
    for _ in range(3):
        state = START.after_rollback(guards.Unstable("x", state))
        rates.append(state.lr_scale)
    assert rates == [0.5, 0.25, 0.125]
    with pytest.raises(TrainingStopped, match="3 times.*last good values") as caught:
        START.after_rollback(guards.Unstable("the gradients were nan", state))
    assert "learning_rate" in caught.value.fix


def test_a_state_survives_as_plain_values_and_older_ones_are_read() -> None:
    values = {**asdict(START), **SPOILT, "micro_batch": 3, "skipped_in_row": 1, "lr_scale": 0.5}
    assert json.loads(json.dumps(asdict(guards.GuardState.from_plain(values)))) == values
    older = {"micro_batch": 4, "lr_scale": 0.5, "trend": {}}
    assert guards.GuardState.from_plain(older) == guards.GuardState(micro_batch=4, lr_scale=0.5)


def test_the_best_is_the_lowest_loss_of_a_trained_adapter() -> None:
    state = START.with_best(0.1, step=0)
    assert state == START, "the base is not an adapter"
    for loss, step in ((0.5, 2), (float("nan"), 4), (0.4, 6), (0.4, 8), (0.6, 10)):
        state = state.with_best(loss, step=step)
    assert (state.best.loss, state.best.step, state.best.stale) == (0.4, 6, 2)


def test_a_plateau_lowers_the_rate_and_a_way_back_forgets_it() -> None:
    state, scales = START, []
    for loss in (0.5, 0.4, 0.4, 0.3999, float("nan"), 0.41, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3):
        state = state.after_validation(loss, patience=3, lower_to=0.5)
        scales.append(state.lr_scale)
    # A loss that is not a number does not count, 0.3999 is not clearly below 0.4, and counting begins again.
    assert scales == [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert state.plateau == guards.Plateau(best=0.3, stale=2)
    assert START.after_going_back(state).plateau == guards.Plateau()
    for _ in range(60):
        state = state.after_validation(0.3, patience=1, lower_to=0.5)
    assert state.lr_scale == guards.LOWEST_SCALE
    slow = replace(state, lr_scale=1e-3).after_validation(0.3, patience=1, lower_to=0.5)
    assert slow.lr_scale == 1e-3, "what a rollback lowered further stays"


# ---- memory


@pytest.mark.parametrize(("cap", "images", "smaller"), [(8, 4, 2), (4, 8, 2), (5, 9, 3), (2, 2, 1)])
def test_out_of_memory_halves_what_was_really_tried(cap: int, images: int, smaller: int) -> None:
    state = guards.GuardState(micro_batch=cap, skipped_in_row=1, fitting_steps=7)
    assert state.after_out_of_memory(images=images, remedies=3) == replace(
        state, micro_batch=smaller, fitting_steps=0, patience_steps=2 * state.patience_steps
    )
    # The pass held one image although four were allowed.
    assert (
        guards.GuardState(micro_batch=4).after_out_of_memory(images=1, remedies=1).micro_batch == 1
    )


@given(planned=st.integers(1, 64), fits=st.integers(1, 64))
def test_the_micro_batch_grows_back_ever_more_rarely(planned: int, fits: int) -> None:
    state, tries, steps = guards.GuardState(micro_batch=planned), [], 20_000
    for step in range(steps):
        while state.micro_batch > fits:
            state = state.after_out_of_memory(images=state.micro_batch, remedies=0)
            tries.append(step)
        state = state.after_fitting(planned=planned)
        assert 1 <= state.micro_batch <= planned
    if fits >= planned:
        assert state == guards.GuardState(micro_batch=planned), (
            "nothing is counted where nothing is wrong"
        )
        return
    assert state.micro_batch > fits / 2 or state.fitting_steps > 0
    assert state.patience_steps <= 3200
    assert len(tries) <= 7 * 6 + steps / 3200 + 7, "failing costs ever less"


# ---- when nothing is learned: exact zeros only, and losses that stay where they were


@pytest.mark.parametrize(
    ("steps", "batch_size", "look"),
    [
        (399, 1, None),  # too short to be half-way after 200 images
        (400, 1, 200),
        (100, 4, 50),
        (5000, 1, 1000),
    ],
)
def test_a_look_takes_enough_images_steps_and_a_share_of_the_run(
    steps: int, batch_size: int, look: int | None
) -> None:
    assert guards.look_step(steps=steps, batch_size=batch_size) == look


def test_zeros_in_a_row_count_and_the_noise_level_that_changed_most() -> None:
    learning = guards.GuardState.from_plain(
        {"micro_batch": 1, "learning": {"zero_gradients": 7, "base": [1.0, 0.5, 0.0]}}
    ).learning
    assert learning.after_gradient(0.0).zero_gradients == 8
    assert learning.after_gradient(1e-30).zero_gradients == 0
    assert learning.least_change([1.0, 0.5, 0.0], so_far=0.2) == 0
    assert learning.least_change([1.001, 0.45, 0.0], so_far=1.0) == pytest.approx(0.1)
    assert learning.least_change([1.0, 0.4999, 9.0], so_far=0.1) == pytest.approx(2e-3)


ZEROS: dict[str, Any] = {"loss": 0.1, "device": "cpu", "loss_scale": None, "reached": True}
STILL: dict[str, Any] = {"rate": 1e-4, "rate_sum": 1e-2}


@pytest.mark.parametrize(
    ("stopped", "cause", "setting"),
    [
        (guards.no_gradients(25, **{**ZEROS, "reached": False}), "takes part", "targets"),
        (guards.no_gradients(25, **{**ZEROS, "device": "mps"}), "MPS", "hardware.device"),
        (guards.no_gradients(25, **ZEROS), "do not change what the base", "targets"),
        (guards.no_movement(25, **STILL, device="mps"), "MPS", "hardware.device=cpu"),
        (guards.no_movement(25, **STILL, device="cpu"), "optimizer does not", "optimizer.name"),
    ],
)
def test_a_run_that_learns_nothing_names_its_cause(
    stopped: TrainingStopped, cause: str, setting: str
) -> None:
    """Five of ten causes; the others: tests/test_learning_end_to_end.py."""
    assert cause in stopped.found and "nothing is learned" in stopped.found
    assert setting in stopped.fix
