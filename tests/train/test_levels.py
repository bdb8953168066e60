"""Noise levels as a function of one uniform number: tables, densities, shifts, ends; and those of default runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.noise_levels import flow_levels, table_levels
from scripts.timestep_table import (
    REFERENCES,
    SD3,
    SIGMAS,
    objective,
    releases,
    share,
)

SIZE = (64, 64)
SIGNAL = DDPMScheduler().alphas_cumprod.double().tolist()
UNIFORMS = st.floats(0.0, 1.0, exclude_max=True)
SAMPLINGS = ("uniform", "logit_normal", "sigmoid", "mode", "cosmap")


def flow(**settings: object) -> Any:
    return flow_levels(
        ObjectiveSettings.model_validate(settings), base_shift=lambda size: size[0] / 16
    )


def sigmas(levels: Any, count: int = 4001) -> list[float]:
    return [levels.draw((k + 0.5) / count, size_px=SIZE).sigma for k in range(count)]


@given(uniform=UNIFORMS, low=st.integers(0, 999), high=st.integers(0, 999))
def test_a_table_level_is_that_of_its_timestep(uniform: float, low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    settings = ObjectiveSettings(min_timestep=low, max_timestep=high)
    level = table_levels(SIGNAL, settings).draw(uniform, size_px=SIZE)
    timestep = int(level.timestep)
    assert low <= timestep <= high and level.timestep == timestep
    assert level.signal == SIGNAL[timestep]
    assert level.alpha == pytest.approx(math.sqrt(SIGNAL[timestep]), rel=1e-6)
    assert level.sigma == pytest.approx(math.sqrt(1 - SIGNAL[timestep]), rel=1e-5)


@given(uniform=UNIFORMS, sampling=st.sampled_from(SAMPLINGS))
def test_a_flow_level_is_never_clean_and_never_past_pure_noise(
    uniform: float, sampling: str
) -> None:
    level = flow(timestep_sampling=sampling, flow_shift=3.0).draw(uniform, size_px=SIZE)
    assert 0 < level.sigma < 1 and level.alpha == 1 - level.sigma
    assert level.timestep == 1000 * level.sigma and level.signal is None


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("logit_normal", {"logit_mean": 1.0, "logit_std": 0.5}),
        ("mode", {"mode_scale": -1.0}),
        ("mode", {"mode_scale": 1.29}),
    ],
)
def test_a_density_is_that_of_diffusers(kind: str, values: dict[str, float]) -> None:
    """diffusers maps its uniform numbers by the same formula; sorted, both are quantiles."""
    generator = torch.Generator().manual_seed(0)
    drawn = compute_density_for_timestep_sampling(kind, 200_000, generator=generator, **values)
    found = sorted(sigmas(flow(timestep_sampling=kind, **values), 2000))
    wanted = torch.quantile(drawn, torch.linspace(0.05, 0.95, 19))
    assert found[100:1901:100] == pytest.approx(wanted.tolist(), abs=0.01)


def test_the_range_of_timesteps_holds_for_flows_too() -> None:
    found = [
        1000 * sigma for sigma in sigmas(flow(min_timestep=200, max_timestep=299, flow_shift=3.0))
    ]
    assert 200 <= min(found) < 201 and 299 < max(found) <= 300


def test_validation_levels_are_fixed_fractions() -> None:
    assert flow(flow_shift=3.0).at(0.9375).sigma == 0.9375
    assert table_levels(SIGNAL, ObjectiveSettings()).at(0.9375).timestep == 937


def test_cosmap_has_the_density_of_its_paper() -> None:
    """2 / (pi (1 - 2t + 2t^2)): the share of draws below t is its integral."""
    found = np.sort(sigmas(flow(timestep_sampling="cosmap"), 4001))
    grid = np.linspace(0.0, 1.0, 20_001)
    density = 2 / (np.pi * (1 - 2 * grid + 2 * grid**2))
    below = np.cumsum(density) / density.sum()
    for part in (0.1, 0.25, 0.5, 0.9):
        wanted = grid[np.searchsorted(below, part)]
        assert found[int(part * 4001)] == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@given(uniform=UNIFORMS, mean=st.floats(-10, 10), std=st.floats(0.1, 10))
def test_tables_are_drawn_by_the_same_densities(
    sampling: str, uniform: float, mean: float, std: float
) -> None:
    settings = ObjectiveSettings.model_validate(
        {
            "timestep_sampling": sampling,
            "min_timestep": 10,
            "max_timestep": 909,
            "logit_mean": mean,
            "logit_std": std,
            "flow_shift": 1.0,
        }
    )
    whole = settings.model_copy(update={"min_timestep": 0, "max_timestep": 999})
    time = flow_levels(whole, base_shift=lambda size: 1.0).draw(uniform, size_px=SIZE).sigma
    level = table_levels(SIGNAL, settings).draw(uniform, size_px=SIZE)
    assert level.timestep == min(10 + int(900 * time), 909)


# ---- at which noise levels default runs train, bounded by the trainers' own formulas; and docs/objective.md


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


def test_the_formula_of_stable_diffusion_3_is_what_the_script_of_diffusers_draws() -> None:
    """The densities are drawn as indices into the timesteps of a scheduler, which are shifted."""
    generator = torch.Generator().manual_seed(0)
    drawn = compute_density_for_timestep_sampling(
        "logit_normal", 40_000, logit_mean=0.0, logit_std=1.0, generator=generator
    )
    sigmas = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas[(drawn * 1000).long()]
    for sigma in SIGMAS:
        found = float((sigmas < sigma).double().mean())
        assert found == pytest.approx(SD3.below(sigma, 1024), abs=0.01)


def test_every_release_has_a_reference() -> None:
    assert RELEASES.keys() == REFERENCES.keys(), "`timesteps` of its family.toml"
    assert sum(facts.release.distilled for facts in RELEASES.values()) >= 5
