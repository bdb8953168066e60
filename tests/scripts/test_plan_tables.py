"""docs/plans.md is what the planner finds now, and the GPUs on it fit."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.config import PRIORITIES
from lora_trainer.planning.run_time import MOST_HOURS
from scripts.plan_tables import (
    BASES,
    CARDS,
    DESKTOP_GIB,
    MACHINE_GIB,
    PAGE,
    page,
    planned,
    releases,
)
from tests.fakes.nvml import GIB


def test_the_page_is_what_the_planner_finds() -> None:
    """After a change of the planner, of costs or of presets run scripts/plan_tables.py."""
    assert PAGE.read_text(encoding="utf-8") == page().rstrip() + "\n"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("source", BASES.values())
def test_every_plan_on_the_page_fits(source: str, card: str) -> None:
    made = planned(source, card)
    assert made.memory.peak_bytes <= (CARDS[card] - DESKTOP_GIB) * GIB
    assert made.host is not None and made.host.peak_bytes <= MACHINE_GIB * GIB


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("source", list(releases()))
def test_defaults_end_in_an_evening(source: str, priority: Any) -> None:
    """Every release on the GPU that stands for each tier: 1, 3 and 8 hours from command to file."""
    for card in CARDS:
        made = planned(source, card, priority)
        whole = made.run_time
        assert whole.seconds <= MOST_HOURS[priority] * 3600, card
        steps = [made.steps * seconds for seconds in made.seconds_per_step]
        assert whole.parts["steps"] == tuple(steps)
        assert whole.low_s < whole.seconds < whole.high_s < 2 * whole.seconds
