"""At which noise levels default runs train, bounded by the trainers' own formulas; and docs/objective.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from lora_trainer.config.layers import TIERS
from lora_trainer.families.facts import BaseFacts
from scripts.timestep_table import (
    PAGE,
    REFERENCES,
    SD3,
    SIGMAS,
    UNIFORM,
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


def test_distilled_releases_are_among_them() -> None:
    distilled = {facts.family for facts in RELEASES.values() if facts.distilled}
    assert distilled == {"sd3", "flux", "flux2", "zimage"}
    assert RELEASES.keys() == REFERENCES.keys()


def test_the_formula_of_stable_diffusion_3_is_what_the_script_of_diffusers_draws() -> None:
    """The densities are drawn as indices into the timesteps of a scheduler, which are shifted."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = compute_density_for_timestep_sampling("logit_normal", 40_000, 0.0, 1.0)
    sigmas = scheduler.sigmas[(drawn * 1000).long()]
    for sigma in SIGMAS:
        found = float((sigmas < sigma).double().mean())
        assert found == pytest.approx(SD3.below(sigma, 1024), abs=0.01)


def test_the_formula_of_stable_diffusion_1_is_the_table_of_diffusers() -> None:
    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000
    )
    noise = (1 - scheduler.alphas_cumprod.double()).sqrt()
    for sigma in SIGMAS:
        found = float((noise < sigma).double().mean())
        assert found == pytest.approx(UNIFORM.below(sigma, 512), abs=0.0015)


def test_the_page_shows_what_is_drawn() -> None:
    page = Path(PAGE).read_text(encoding="utf-8")
    assert with_timestep_table(page) == page, "run python scripts/timestep_table.py"
