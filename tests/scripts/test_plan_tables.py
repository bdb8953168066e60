"""docs/plans.md is what the planner finds now, and the cards on it fit."""

from __future__ import annotations

import pytest

from lora_trainer.hardware import GIB
from scripts.plan_tables import BASES, CARDS, DESKTOP_GIB, MACHINE_GIB, PAGE, page, planned


def test_the_page_is_what_the_planner_finds() -> None:
    """After a change of the planner, of costs or of presets run scripts/plan_tables.py."""
    assert PAGE.read_text(encoding="utf-8") == page().rstrip() + "\n"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("source", BASES.values())
def test_every_plan_on_the_page_fits(source: str, card: str) -> None:
    made = planned(source, card)
    assert made.memory.peak_bytes <= (CARDS[card] - DESKTOP_GIB) * GIB
    assert made.host is not None and made.host.bytes <= MACHINE_GIB * GIB
