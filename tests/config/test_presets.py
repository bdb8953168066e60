"""The presets as shipped: valid, whole, ordered in cost, within the GPUs of their tier."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import jsonschema
import pytest

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config import PRIORITIES, layers
from lora_trainer.config.config import flatten
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.plan import Plan
from lora_trainer.planning.run_time import run_length
from scripts import plan_tables
from scripts.write_schema import preset_schema
from tests.config.test_layers import resolved
from tests.fakes import plans
from tests.fakes.nvml import GIB
from tests.fakes.plans import machine, mini_facts
from tests.fakes.runs import ROOT

SMALLEST_CARD_GIB = {"6-8": 6.0, "10-12": 10.0, "16-24": 16.0}
CARDS = list(itertools.product(layers.preset_families(), SMALLEST_CARD_GIB))
MARGIN_GIB = 0.5
"""What a desktop and its driver take of the smallest GPU of a tier."""
MACHINE_GIB = 24.8
"""What a plan may use of the machine that presets are made for: 32 GiB, and a little used."""


def more_gib(family: str) -> int:
    """Return what a family needs of the machine beyond the usual one, as its family.toml states it."""
    first = next(iter(families.family(family).releases))
    return plan_tables.ram_gib_of(first) - plan_tables.RAM_GIB


LARGE = frozenset(name for name in layers.preset_families() if more_gib(name))
"""Families whose text encoder is larger than the usual machine: they need 8 GiB of GPU beside a larger one."""


def smallest_card_gib(family: str, tier: str) -> float:
    gib = SMALLEST_CARD_GIB.get(tier, 6.0)
    return max(gib, 8.0) if family in LARGE else gib


def machine_gib(family: str) -> float:
    return MACHINE_GIB + more_gib(family)


def smallest_machine(family: str, tier: str) -> Hardware:
    """Return the smallest machine of a tier; the rates of its GPU are those of its size."""
    gib = smallest_card_gib(family, tier)
    free_bytes = int((gib - MARGIN_GIB) * GIB)
    here = machine(gib, ram_gib=machine_gib(family), name="an assumed GPU", free_bytes=free_bytes)
    return replace(here, expandable_segments=False, gpus=() if tier == "cpu" else here.gpus)


@cache
def planned(
    family: str, tier: str, priority: Any, *, images: int = 20, **changed: Any
) -> tuple[Plan, ...]:
    """Plan a preset for each release on the smallest machine of its tier."""
    sources = [
        source for source in plan_tables.releases() if families.known_base(source).family == family
    ]
    return tuple(
        plans.planned(
            base,
            smallest_machine(family, tier),
            priority=priority,
            preset_tier=tier,
            overrides={key.replace("__", "."): value for key, value in changed.items()},
            images=images,
            samples_per_epoch=images,
        )
        for base in ([mini_facts()] if tier == "cpu" else sources)
    )


def shipped(name: str) -> Any:
    return json.loads(resources.files("lora_trainer.presets").joinpath(name).read_text("utf-8"))


def test_each_family_has_a_file_that_follows_the_schema_and_works_in_every_cell() -> None:
    assert set(layers.preset_families()) == set(families.NAMES)
    for family in layers.preset_families():
        jsonschema.validate(shipped(f"{family}.json"), preset_schema())
        assert layers.load_presets(family).family == family
        for tier, priority in itertools.product(layers.TIERS, PRIORITIES):
            if not layers.load_presets(family).unsupported(tier, priority):
                assert resolved(family=family, tier=tier, priority=priority)


@pytest.mark.parametrize(("family", "tier"), CARDS)
@pytest.mark.parametrize("priority", PRIORITIES)
def test_every_cell_fits_the_smallest_card_of_its_tier_or_says_why_not(
    family: str, tier: str, priority: Any
) -> None:
    """Every release of the family, with a margin for the desktop; what cannot work must really not."""
    presets = layers.load_presets(family)
    if presets.unsupported(tier, priority):
        with pytest.raises(MachineError):
            planned(family, tier, priority)
        return
    for made in planned(family, tier, priority):
        limit = (smallest_card_gib(family, tier) - MARGIN_GIB) * GIB
        assert made.memory.peak_bytes <= limit == made.memory.limit_bytes
        assert made.host is not None and made.host.peak_bytes <= machine_gib(family) * GIB


@pytest.mark.parametrize(("family", "tier"), [row for row in CARDS if row[0] not in LARGE])
def test_priorities_are_ordered_in_the_time_they_take(family: str, tier: str) -> None:
    """A step of a higher priority takes as long or longer, and there are more of them.

    Without sample images, for which a plan streams more blocks and which another has no room for. Not of the large
    families, whose steps last as long as the copies from the machine's memory.
    """
    presets = layers.load_presets(family)
    supported = [found for found in PRIORITIES if not presets.unsupported(tier, found)]
    plans = [planned(family, tier, found, sampling__every_steps=0) for found in supported]
    for made in zip(*plans, strict=True):  # one release
        steps = [low * high for low, high in (each.seconds_per_step for each in made)]
        if (
            len({each.config.data.resolution for each in made}) == 1
        ):  # else fewer steps had time for larger images
            assert steps == sorted(steps)
        whole = [each.steps * each.seconds_per_step[1] for each in made]
        assert whole == sorted(set(whole)), "a higher priority takes longer"


def test_the_embedded_base_trains_about_as_long_as_was_tried_and_samples() -> None:
    for priority, images in (("speed", 150), ("balanced", 300), ("quality", 300)):
        (made,) = planned("sd15", "cpu", priority, images=14)
        assert abs(made.steps - images) <= 10
        assert made.memory.fits and made.config.sampling.every_steps != 0


TIER_SETTINGS = re.compile(
    r"data\.(more_resolutions|resolution)|optimizer\.name|(hardware|memory|sampling)\..*"
)
"""Settings that a tier or a tier's cell may change: those of memory and speed."""
OWN_RECIPE = (families.DEFAULT_FAMILY, "cpu")
"""The embedded miniature base's, which is Stable Diffusion 1.5 in its layout alone."""


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("family", layers.preset_families())
def test_how_much_is_learned_does_not_depend_on_the_tier(family: str, priority: Any) -> None:
    """R8: the same images give the same updates, batch, rate, rank and layers on every GPU."""
    learned = {}
    for tier in layers.TIERS:
        if (family, tier) == OWN_RECIPE or layers.load_presets(family).unsupported(tier, priority):
            continue
        settings = flatten(resolved(family=family, tier=tier, priority=priority).config)
        values = {key: settings[key] for key in settings if not TIER_SETTINGS.fullmatch(key)}
        learned[tier] = values
        if tier == "cpu":
            continue
        for made in planned(family, tier, priority):
            for key in ("train.batch_size", "optimizer.learning_rate", "adapter.rank"):
                assert flatten(made.config)[key] == values[key], (tier, key)
            steps, _ = run_length(images=20, batch_size=1, views=values["train.views"])
            assert made.steps * made.config.train.batch_size == steps
    first, *others = learned.values()
    for other in others:
        assert {key: value for key, value in other.items() if first[key] != value} == {}


@pytest.mark.parametrize(
    ("family", "tier"), [*((name, "10-12") for name in families.NAMES), OWN_RECIPE]
)
def test_priorities_get_as_far_or_farther(family: str, tier: str) -> None:
    """Updates x rate^2 (Malladi et al. 2022): of speed that of balanced, of quality more."""

    def how_far(priority: Any) -> float:
        config = resolved(family=family, tier=tier, priority=priority).config
        updates = config.train.views / config.train.batch_size
        return updates * config.optimizer.learning_rate**2

    balanced = how_far("balanced")
    assert how_far("speed") == pytest.approx(balanced, rel=0.05)
    farther = 1.0 if (family, tier) == ("sd15", "cpu") else 1.5
    assert how_far("quality") >= farther * balanced


def test_what_the_page_says_of_our_rates_beside_those_of_others_is_what_the_presets_have() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "presets.md").read_text(encoding="utf-8"))
    assert "learning rate of 3e-4, but alpha 1 at rank 16" in page
    assert "Our presets multiply it by 1 (alpha = rank)" in page
    for family, tier, priority in itertools.product(
        layers.preset_families(), layers.TIERS, PRIORITIES
    ):
        if not layers.load_presets(family).unsupported(tier, priority):
            adapter = resolved(family=family, tier=tier, priority=priority).config.adapter
            assert adapter.alpha in ("auto", adapter.rank), (family, tier, priority)
    klein = plan_tables.planned("black-forest-labs/FLUX.2-klein-base-9B", "16 GiB (RTX 4060 Ti)")
    updates, rate = f"{klein.steps:,}", klein.config.optimizer.learning_rate
    assert rate == 1e-4 and f"`balanced` ({updates} updates at 1e-4 for up to 20 images)" in page


def test_what_the_pages_say_of_views_and_samples_is_what_the_presets_have() -> None:
    presets, plans = (
        re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text(encoding="utf-8"))
        for name in ("presets.md", "plans.md")
    )
    transformers = [name for name in families.NAMES if name not in ("sd15", "sd2", "sdxl")]
    for priority, embedded in (("speed", 60), ("balanced", 120)):
        configs = [
            resolved(family=name, tier="10-12", priority=priority).config for name in transformers
        ]
        views = [config.train.views for config in configs]
        said = f"{min(views)} to {max(views)} views instead of {embedded} with `{priority}`"
        assert said in presets
        assert resolved(family="sd15", tier="cpu", priority=priority).config.train.views == embedded
    assert "draws two sample images instead of four" in plans
    assert "one sample image with `speed`, two with `balanced` and four with `quality`" in plans
    usual = {"speed": 2, "balanced": 4, "quality": 4}
    for family, tier, priority in itertools.product(transformers, layers.TIERS[1:], PRIORITIES):
        config = resolved(family=family, tier=tier, priority=priority).config
        expected = (
            {"speed": 1, "balanced": 2, "quality": 4}[priority]
            if family == "ideogram4"
            else usual[priority]
        )
        if (family, tier, priority) == ("lumina2", "10-12", "speed"):
            expected = 1
        assert config.sampling.prompts_from_captions == expected, (family, tier, priority)
        assert config.train.batch_size == 1, (family, tier, priority)
