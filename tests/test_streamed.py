"""Which blocks are streamed, the bytes that go with it, and those of a quantised weight, by formula."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.declare import moved_bytes, saved_bytes, streamed_indices, weight_bytes

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


@pytest.mark.parametrize(
    ("precision", "bits"),
    [("fp32", 32), ("bf16", 16), ("fp16", 16), ("int8", 8.01), ("fp8", 8.01), ("nf4", 4.128)],
)
def test_bits_per_weight_of_a_large_layer(precision: Any, bits: float) -> None:
    found = 8 * weight_bytes(fan_in=3072, out=12288, precision=precision) / (3072 * 12288)
    assert found == pytest.approx(bits, abs=0.002)


def test_an_odd_number_of_weights_and_a_begun_block_are_whole_bytes() -> None:
    """5 x 13 = 65 weights: 33 bytes, two blocks, one block of scales, their mean and their table."""
    assert weight_bytes(fan_in=5, out=13, precision="nf4") == 33 + 2 + 4 + 4 + 1024
    assert weight_bytes(fan_in=5, out=13, precision="int8") == 65 + 4 * 13
