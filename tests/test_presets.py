"""The presets as shipped: valid, whole, ordered in cost, within the cards of their tier."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import jsonschema
import pytest

from lora_trainer.config import build_config
from lora_trainer.families import DEFAULT_FAMILY, MODULES, known_base
from lora_trainer.families import family as load_family
from lora_trainer.hardware import GIB, Hardware, assume_card
from lora_trainer.plan import Plan, PlanInput, plan
from lora_trainer.resolve import (
    PRIORITIES,
    TIERS,
    Priority,
    load_presets,
    preset_families,
    preset_names,
    preset_schema,
    resolve,
)
from tests.fakes.stable_diffusion import UNetCosts, mini_facts, sd15_facts

CELLS = list(itertools.product(preset_families(), TIERS, PRIORITIES))
SMALLEST_CARD_GIB = {"6-8": 6, "10-12": 10, "16-24": 16}


def machine() -> Hardware:
    return Hardware(
        gpus=(),
        gpu_reason="none",
        cpu_name="",
        cpu_threads=2,
        ram_total_bytes=8 * GIB,
        ram_free_bytes=6 * GIB,
        packages={"bitsandbytes": "0.50", "xformers": None},
        reasons={},
    )


def planned(family: str, tier: str, priority: Priority, *, images: int = 20) -> Plan:
    """Plan a preset on the smallest machine of its tier."""
    resolved = resolve(
        family=family, tier=tier, priority=priority, preset="auto", config_file=None, overrides={}
    )
    on_cpu = tier == "cpu"
    hardware = machine() if on_cpu else assume_card(machine(), vram_gib=SMALLEST_CARD_GIB[tier])
    facts = mini_facts() if on_cpu else sd15_facts()
    return plan(
        PlanInput(
            resolved=resolved,
            facts=facts,
            family=UNetCosts(),
            hardware=hardware,
            images=images,
            samples_per_epoch=images,
            buckets=[(facts.resolution_px, facts.resolution_px)],
        )
    )


def shipped(name: str) -> dict[str, object]:
    text = resources.files("lora_trainer.presets").joinpath(name).read_text("utf-8")
    loaded = json.loads(text)
    assert isinstance(loaded, dict)
    return loaded


def test_the_schema_file_is_the_one_config_makes() -> None:
    """After a change of Config run scripts/write_schema.py."""
    assert shipped("schema.json") == preset_schema()


@pytest.mark.parametrize("family", preset_families())
def test_each_file_follows_the_schema_and_is_named_after_its_family(family: str) -> None:
    jsonschema.validate(shipped(f"{family}.json"), preset_schema())
    assert load_presets(family).family == family


@pytest.mark.parametrize(
    "broken",
    [
        {"base": {"train.stepz": 1}},
        {"base": {"train.batch_size": 0}},
        {"base": {"train.steps": "many"}},
        {"cells": {"6-8/slow": {}}},
        {"cells": {"6-8/speed": {"unsupported": ""}}},
        {"tiers": {}},
    ],
)
def test_the_schema_refuses_what_config_refuses(broken: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**shipped("sd15.json"), **broken}, preset_schema())


def test_every_registered_family_has_presets() -> None:
    assert set(preset_families()) == set(MODULES)
    assert set(preset_names()) == {f"{family}/{tier}" for family in MODULES for tier in TIERS}


@pytest.mark.parametrize(("family", "tier", "priority"), CELLS)
def test_every_cell_works_or_says_why_not(family: str, tier: str, priority: Priority) -> None:
    presets = load_presets(family)
    if presets.unsupported(tier, priority):
        return
    values = {**presets.base, **presets.tiers[tier], **presets.priorities[priority]}
    assert build_config({**values, **presets.cells.get(f"{tier}/{priority}", {})})


@pytest.mark.parametrize(("family", "tier", "priority"), CELLS)
def test_a_cell_says_unsupported_only_where_the_weights_alone_exceed_its_cards(
    family: str, tier: str, priority: Priority
) -> None:
    """And the plan of a supported cell is made on the public release, or refused with the arithmetic."""
    facts = known_base(load_family(family).default_source)
    assert facts is not None
    weights_gib = 2 * facts.parts["denoiser"].parameters / GIB
    if load_presets(family).unsupported(tier, priority):
        assert weights_gib > SMALLEST_CARD_GIB[tier]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("images", [1, 14, 20, 400])
def test_quality_costs_at_least_balanced_and_that_at_least_speed(tier: str, images: int) -> None:
    plans = [planned("sd15", tier, priority, images=images) for priority in PRIORITIES]
    costs = [
        (made.steps, int(made.config.data.resolution), made.config.adapter.rank) for made in plans
    ]
    for cheaper, dearer in itertools.pairwise(costs):
        assert all(low <= high for low, high in zip(cheaper, dearer, strict=True))
    products = [steps * side * rank for steps, side, rank in costs]
    assert products == sorted(set(products)), "a higher priority must do more"


@pytest.mark.parametrize(("tier", "priority"), list(itertools.product(TIERS, PRIORITIES)))
def test_every_cell_of_the_default_family_fits_the_smallest_card_of_its_tier(
    tier: str, priority: Priority
) -> None:
    made = planned(DEFAULT_FAMILY, tier, priority)
    assert made.memory.fits
    assert made.config.sampling.every_steps != 0, "sample images must fit too"


@pytest.mark.parametrize(
    ("priority", "fewest", "most"),
    [("speed", 140, 160), ("balanced", 290, 310), ("quality", 490, 510)],
)
def test_the_embedded_base_trains_about_as_long_as_was_tried(
    priority: Priority, fewest: int, most: int
) -> None:
    assert fewest <= planned("sd15", "cpu", priority, images=14).steps <= most


def test_a_usual_set_on_a_12_gib_card_takes_1000_to_1500_steps() -> None:
    assert 1000 <= planned("sd15", "10-12", "balanced", images=20).steps <= 1500
