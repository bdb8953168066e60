"""Which results of frozen layers a recomputed block keeps."""

from __future__ import annotations

import pytest

from lora_trainer.network.gradient_checkpointing import keeps_product


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
