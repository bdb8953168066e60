"""docs/plans.md and the tables on the front page are what the planner finds now, and what they promise holds."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.config import PRIORITIES
from lora_trainer.planning.run_time import MOST_HOURS
from scripts import model_table, plan_tables
from scripts.plan_tables import CARDS
from tests.fakes.nvml import GIB


def test_the_pages_are_what_the_planner_finds() -> None:
    """After a change of the planner, of costs or of presets run scripts/plan_tables.py and scripts/model_table.py."""
    written = plan_tables.PAGE.read_text(encoding="utf-8")
    assert written == plan_tables.page().rstrip() + "\n"
    front = model_table.PAGE.read_text(encoding="utf-8")
    assert model_table.with_model_tables(front) == front


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("source", list(plan_tables.releases()))
def test_defaults_fit_and_end_in_an_evening(source: str, priority: Any) -> None:
    """Every release on the GPU that stands for each tier: 1, 3 and 8 hours from command to file."""
    for card, card_gib in CARDS.items():
        made = plan_tables.planned(source, card, priority)
        assert made.memory.peak_bytes <= (card_gib - plan_tables.DESKTOP_GIB) * GIB
        assert made.host is not None and made.host.peak_bytes <= plan_tables.MACHINE_GIB * GIB
        whole = made.run_time
        assert whole.seconds <= MOST_HOURS[priority] * 3600, card
        steps = [made.steps * seconds for seconds in made.seconds_per_step]
        assert whole.parts["steps"] == tuple(steps)
        assert whole.low_s < whole.seconds < whole.high_s < 2 * whole.seconds
