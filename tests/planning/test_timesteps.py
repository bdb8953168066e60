"""The timesteps that a plan shows are those that its run draws."""

from __future__ import annotations

import pytest

from lora_trainer import families
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.noise_levels import levels_of
from lora_trainer.planning.timesteps import PARTS, share_below, shares_text, timestep_shares
from scripts.timestep_table import REFERENCES, objective

SIZE = (1024, 1024)


@pytest.mark.parametrize("name", families.NAMES)
def test_shares_are_those_of_the_levels_that_are_drawn(name: str) -> None:
    family = families.family(name)
    facts = next(iter(family.releases.values()))
    settings = objective(facts)
    shares = timestep_shares(facts, settings, [SIZE])
    levels = levels_of(facts, settings)
    drawn = [levels.draw((k + 0.5) / 500, size_px=SIZE).timestep for k in range(500)]
    assert sum(shares) == pytest.approx(1)
    for timestep in (200, 500, 800):
        below = sum(found < timestep for found in drawn) / len(drawn)
        assert share_below(shares, timestep) == pytest.approx(below, abs=0.005)
    if facts.release.prediction == "flow" and facts.source in REFERENCES:
        theirs = REFERENCES[facts.source].below(0.5, facts.resolution_px)
        own = timestep_shares(facts, settings, [(facts.resolution_px, facts.resolution_px)])
        assert share_below(own, 500) == pytest.approx(theirs, abs=0.02)


def test_sizes_count_by_their_images() -> None:
    facts = families.family("flux").releases["black-forest-labs/FLUX.1-dev"]
    settings = ObjectiveSettings(timestep_sampling="sigmoid", flow_shift="resolution")
    small, large = (512, 512), (1024, 1024)
    apart = [timestep_shares(facts, settings, [size]) for size in (small, large)]
    mixed = timestep_shares(facts, settings, [small, large, large, large])
    assert mixed == pytest.approx([0.25 * a + 0.75 * b for a, b in zip(*apart, strict=True)])
    assert share_below(apart[0], 500) > share_below(apart[1], 500)


def test_a_range_of_timesteps_shows() -> None:
    facts = families.family("flux").releases["black-forest-labs/FLUX.1-dev"]
    settings = ObjectiveSettings(min_timestep=500, timestep_sampling="uniform", flow_shift=1.0)
    shares = timestep_shares(facts, settings, [SIZE])
    assert shares == pytest.approx([0] * (PARTS // 2) + [2 / PARTS] * (PARTS // 2), abs=1e-3)
    assert shares_text(shares) == (
        "0 (clean) |          ██████████| 1000 (noise); 0 % are below 500, 0 % below 200"
    )
