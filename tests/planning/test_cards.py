"""GPUs by name, and what stands for those that are not known."""

from __future__ import annotations

import pytest

from lora_trainer.hardware.machine import GIB
from lora_trainer.planning.step_time import card


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A100-SXM4", "A100"), ("A10G", "A10")],
)
def test_the_longest_name_counts(name: str, known: str) -> None:
    found = card(name, total_bytes=4 * GIB)
    assert (found.name, found.stands_for) == (known, "")


@pytest.mark.parametrize("total_gib", [4, 6, 8, 12, 16, 24, 32, 48, 80, 192])
def test_an_unknown_card_is_taken_for_an_ordinary_one_of_its_size(total_gib: int) -> None:
    found = card("Voodoo 2", total_bytes=total_gib * GIB)
    assert found.stands_for == "Voodoo 2"
    assert found.name != "Voodoo 2"
    if total_gib >= 12:
        smaller = card("Voodoo 2", total_bytes=6 * GIB)
        assert found.flops_per_s > smaller.flops_per_s
