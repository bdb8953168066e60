"""At which noise levels default runs train, bounded by the trainers' own formulas; and docs/objective.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.config.layers import TIERS
from lora_trainer.families.facts import BaseFacts
from scripts.timestep_table import (
    PAGE,
    REFERENCES,
    SIGMAS,
    objective,
    releases,
    share,
    with_timestep_table,
)

RELEASES = {facts.source: facts for facts in releases()}
CLOSE = 0.002
"""Of all timesteps: what discrete levels and a finite number of draws may differ by."""


@pytest.mark.parametrize("source", RELEASES)
@pytest.mark.parametrize("side_px", [512, 1024])
def test_a_default_run_draws_the_timesteps_of_its_reference(source: str, side_px: int) -> None:
    """R3: Z-Image trained 3.7 % of its timesteps below sigma 0.5, its reference half of them."""
    facts, reference = RELEASES[source], REFERENCES[source]
    settings = objective(facts)
    for sigma in SIGMAS:
        ours = share(facts, settings, sigma=sigma, side_px=side_px)
        assert ours == pytest.approx(reference.below(sigma, side_px), abs=CLOSE), sigma


@pytest.mark.parametrize("source", RELEASES)
def test_no_tier_and_no_priority_draws_others(source: str) -> None:
    facts: BaseFacts = RELEASES[source]
    found = {
        objective(facts, tier=tier, priority=priority).model_dump_json()
        for tier in TIERS
        for priority in ("balanced", "speed", "quality")
    }
    assert len(found) == 1


def test_the_page_shows_what_is_drawn_of_every_release() -> None:
    assert RELEASES.keys() == REFERENCES.keys()
    page = Path(PAGE).read_text(encoding="utf-8")
    assert with_timestep_table(page) == page, "run python scripts/timestep_table.py"
