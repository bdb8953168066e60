"""The guards' state machine: when it counts, when it halves, when it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.errors import TrainingStopped
from lora_trainer.train.guards import (
    MAX_SKIPPED_IN_ROW,
    GuardState,
    after_out_of_memory,
    after_step,
)

START = GuardState(micro_batch=8)


def test_a_finite_step_changes_nothing() -> None:
    assert after_step(START, finite=True, step=1) == START


def test_a_finite_step_ends_a_row_but_not_the_count() -> None:
    state = GuardState(micro_batch=2, skipped_in_row=3, skipped=7)
    assert after_step(state, finite=True, step=9) == GuardState(micro_batch=2, skipped=7)


@given(steps=st.lists(st.booleans(), max_size=60))
def test_it_stops_at_the_fifth_in_a_row_and_never_before(steps: list[bool]) -> None:
    text = "".join("." if finite else "x" for finite in steps)
    state = START
    for number, finite in enumerate(steps, start=1):
        if text[:number].endswith("x" * 5):
            with pytest.raises(TrainingStopped, match=f"5 steps in a row, up to step {number};"):
                after_step(state, finite=finite, step=number)
            return
        state = after_step(state, finite=finite, step=number)
        assert state.skipped == text[:number].count("x")
        assert state.micro_batch == START.micro_batch
    assert MAX_SKIPPED_IN_ROW == 5


@pytest.mark.parametrize(
    ("cap", "images", "smaller"), [(8, 8, 4), (8, 4, 2), (4, 8, 2), (5, 9, 3), (3, 3, 2), (2, 2, 1)]
)
def test_out_of_memory_halves_what_was_really_tried(cap: int, images: int, smaller: int) -> None:
    state = GuardState(micro_batch=cap, skipped_in_row=1, skipped=2)
    assert after_out_of_memory(state, images=images) == GuardState(
        micro_batch=smaller, skipped_in_row=1, skipped=2
    )


@pytest.mark.parametrize(("cap", "images"), [(1, 4), (4, 1), (1, 1)])
def test_out_of_memory_with_one_image_is_the_end(cap: int, images: int) -> None:
    with pytest.raises(TrainingStopped, match="one image at a time") as caught:
        after_out_of_memory(GuardState(micro_batch=cap), images=images)
    assert "gradient_checkpointing" in caught.value.fix
