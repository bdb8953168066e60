"""What a weight takes, by formula; that it is what is stored, tests/model/test_quantize.py shows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lora_trainer.config.choices import weight_bytes


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


def test_the_plan_can_ask_without_torch() -> None:
    code = "import sys, lora_trainer.config.choices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
