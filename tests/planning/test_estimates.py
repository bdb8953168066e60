"""Length and disk: formulas against the runs they were chosen for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.planning.run_time import COUNTED_IMAGES, run_length


@pytest.mark.parametrize(
    ("views", "images", "batch_size", "steps"),
    [
        (60, 14, 8, 150),  # counts as 20
        (120, 14, 8, 300),
        (200, 14, 8, 500),
        (120, 20, 2, 1200),
        (120, 100, 2, 6000),
        (120, 500, 4, 4800),  # counts as 160
        (120, 30_000, 4, 7500),  # every image at least once
        (120, 1, 7, 343),  # rounded up
    ],
)
def test_steps_by_the_documented_formula(
    views: int, images: int, batch_size: int, steps: int
) -> None:
    assert run_length(images=images, batch_size=batch_size, views=views)[0] == steps


def test_repeats_shift_weight_and_lengthen_a_run_only_where_pictures_would_be_missed() -> None:
    def steps(samples: int, repeats: int) -> int:
        return run_length(images=20, batch_size=1, views=120, samples=samples, repeats=repeats)[0]

    assert steps(20, 1) == steps(20 * 10, 10) == steps(20 * 1000, 1000) == 2400
    assert steps(10 * 1 + 10 * 20, 1) == 2400
    assert steps(10 * 1 + 10 * 500, 1) == 5010, "or the ten would hardly be met"


@given(images=st.integers(1, 100_000), batch_size=st.integers(1, 64), views=st.integers(1, 1000))
def test_more_pictures_or_views_are_never_fewer_steps_and_each_is_seen(
    images: int, batch_size: int, views: int
) -> None:
    steps = run_length(images=images, batch_size=batch_size, views=views)[0]
    assert steps * batch_size >= images
    assert run_length(images=images + 1, batch_size=batch_size, views=views)[0] >= steps
    assert run_length(images=images, batch_size=batch_size, views=views + 1)[0] >= steps


def test_the_reason_has_the_numbers_of_the_rule() -> None:
    reason = run_length(images=14, batch_size=8, views=120)[1]
    for number in ("120", "14", *map(str, COUNTED_IMAGES), "2,400", "8"):
        assert number in reason


def test_regularisation_images_come_on_top_of_those_that_are_learned() -> None:
    plain = run_length(images=14, batch_size=8, views=120)
    more = run_length(images=14, batch_size=8, views=120, regularisation=0.5)
    assert more[0] == 1.5 * plain[0]
    assert more[1].endswith("each with 0.5 regularisation images")
