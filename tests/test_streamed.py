"""Which blocks are streamed, and the bytes that go with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.choices import moved_bytes, saved_bytes, streamed_indices

COUNTS = st.integers(1, 80).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total)))


@given(COUNTS)
def test_streamed_blocks_are_as_many_as_asked_for_and_evenly_spread(
    counts: tuple[int, int],
) -> None:
    total, count = counts
    chosen = streamed_indices(total, count)
    assert len(chosen) == count
    assert list(chosen) == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < total
    # Round the ring: sampling goes from the last block to the first.
    gaps = {
        after - before
        for before, after in zip(chosen, (*chosen[1:], chosen[0] + total), strict=True)
    }
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("count", "chosen", "moved", "saved"),
    [
        (0, (), 0, 0),
        (1, (2,), 30, 30 - 30),
        (2, (1, 3), 60, 60 - 2 * 40),
        (4, (0, 1, 3, 4), 120, 120 - 2 * 50),
        (5, (0, 1, 2, 3, 4), 150, 150 - 2 * 50),
    ],
)
def test_what_is_set_free_is_what_is_moved_without_two_of_the_largest(
    count: int, chosen: tuple[int, ...], moved: int, saved: int
) -> None:
    blocks = [10, 20, 30, 40, 50]
    assert streamed_indices(len(blocks), count) == chosen
    assert moved_bytes(blocks, count) == moved
    assert saved_bytes(blocks, count) == saved
