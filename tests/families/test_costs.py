"""Which blocks keep more than the others, and what a mixture of two kinds costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.costs.sample_cost import SampleCost, keeps_product, kept_blocks, mixed

FULL = SampleCost(
    saved_bytes=100,
    adapter_saved_bytes=0,
    temporary_bytes=40,
    forward_bytes=30,
    conditioning_bytes=5,
    forward_flops=1000,
    step_flops=3400,
    kernels=90,
)
SELECTIVE = replace(FULL, saved_bytes=300, temporary_bytes=10, step_flops=2800, kernels=80)


@given(count=st.integers(1, 100), share=st.floats(0.0, 1.0))
def test_blocks_that_keep_more_are_spread_and_the_last_is_one(count: int, share: float) -> None:
    found = kept_blocks(count, share)
    kept = int(share * count + 1e-9)
    assert len(found) == kept and found <= set(range(count))
    if kept:
        assert count - 1 in found
        gaps = sorted(found)
        distances = [after - before for before, after in zip(gaps, gaps[1:], strict=False)]
        assert not distances or max(distances) - min(distances) <= 1


def test_all_or_none_or_every_second() -> None:
    assert kept_blocks(6, 0.0) == frozenset()
    assert kept_blocks(6, 1.0) == frozenset(range(6))
    assert kept_blocks(6, 0.5) == {1, 3, 5}


def test_a_mixture_lies_on_the_line_and_its_peak_is_the_higher_of_two_moments() -> None:
    """When the forward pass is over, and when the first block that keeps little has run again."""
    for share, temporary in ((0.05, 30), (0.1, 20), (0.5, 10), (1.0, 10)):
        found = mixed(FULL, SELECTIVE, share=share)
        assert found.saved_bytes == round(100 + 200 * share)
        assert found.temporary_bytes == temporary
        assert found.step_flops == round(3400 - 600 * share)
    assert mixed(FULL, SELECTIVE, share=0.0) == FULL
    assert mixed(FULL, SELECTIVE, share=1.0) == SELECTIVE


@pytest.mark.parametrize(
    ("fan_in", "out", "light", "selective"),
    [(64, 256, True, False), (64, 64, True, False), (256, 64, True, True), (4, 256, False, False)],
)
def test_products_are_kept_by_the_arithmetic_for_a_byte(
    fan_in: int, out: int, light: bool, selective: bool
) -> None:
    assert keeps_product("light", fan_in=fan_in, out=out) == light
    assert keeps_product("selective", fan_in=fan_in, out=out) == selective
    assert not keeps_product("full", fan_in=fan_in, out=out)
