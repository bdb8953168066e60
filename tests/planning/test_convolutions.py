"""How convolutions are computed: by what earlier runs found on the card, else by the first steps of a long run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.wording import GIB
from lora_trainer.planning.known_convolutions import (
    MOST_STEPS,
    FastestWay,
    known_ways,
    remember_way,
    steps_alike,
)
from lora_trainer.planning.plan import COMPARED_FROM, COMPARED_WITH_BYTES, plan
from tests.fakes.plans import machine, request

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
FLUX = "black-forest-labs/FLUX.1-dev"
CARD = machine(80, ram_gib=200)
LONG = {"train.steps": 3000}
KEPT = {"memory.gradient_checkpointing": "full", "memory.micro_batch": 1}


def chosen(base: str = SDXL, hardware: Any = CARD, *, how: Any = None, **overrides: Any) -> Any:
    """Return what `hardware.convolutions` becomes, and why."""
    settings = LONG | {key.replace("__", "."): value for key, value in overrides.items()}
    made = plan(request(base, hardware, overrides=settings, **(how or {})))
    origin = made.origins.get("hardware.convolutions")
    return made.config.hardware.convolutions, "" if origin is None else origin.reason


def test_a_long_run_on_a_new_card_compares() -> None:
    value, why = chosen()
    assert value == "fastest" and f"up to {MOST_STEPS} first steps" in why


@pytest.mark.parametrize(
    ("base", "hardware", "how", "overrides", "why"),
    [
        (FLUX, CARD, {}, {}, "no convolutions"),
        (SDXL, CARD, {}, {"hardware__device": "cpu"}, "GPUs only"),
        (SDXL, CARD, {}, {"train__deterministic": True}, "other bits"),
        (SDXL, CARD, {"processes": 2}, {}, "the slowest of them"),
        (SDXL, CARD, {}, {"train__steps": COMPARED_FROM * MOST_STEPS - 1}, "of 639 steps"),
    ],
)
def test_where_nothing_is_to_be_gained_or_found_out_they_stay_plain(
    base: str, hardware: Any, how: Any, overrides: Any, why: str
) -> None:
    value, reason = chosen(base, hardware, how=how, **overrides)
    assert value == "plain" and why in reason


def test_a_full_card_is_not_tried() -> None:
    made = plan(request(SDXL, CARD, overrides=LONG | KEPT))
    limit_gib = (made.memory.peak_bytes + COMPARED_WITH_BYTES // 2) / GIB
    value, why = chosen(hardware__vram_limit_gib=limit_gib, **KEPT)
    assert value == "plain" and "are free to compare" in why


@pytest.mark.parametrize(
    ("asked", "overrides", "kept"),
    [
        ("channels_last", {"train__deterministic": True}, True),
        ("both", {"train__deterministic": True}, False),
        ("benchmark", {}, True),
        ("channels_last", {"hardware__device": "cpu"}, False),
    ],
)
def test_what_was_asked_for_stays_where_it_can(asked: str, overrides: Any, kept: bool) -> None:
    value, why = chosen(hardware__convolutions=asked, **overrides)
    assert value == (asked if kept else "plain")
    assert kept or why.startswith(f"instead of {asked}: ")


def test_what_a_run_has_found_is_known_for_its_card_size_and_precision(tmp_path: Path) -> None:
    gpu, made = CARD.gpus[0], plan(request(SDXL, CARD, overrides=LONG))
    alike, family = steps_alike(made.config), "sdxl"
    assert known_ways(tmp_path, CARD, gpu=gpu, family=family) == {}
    remember_way(tmp_path, CARD, "both", 0.1234, gpu=gpu, family=family, alike=alike)
    known = known_ways(tmp_path, CARD, gpu=gpu, family=family)
    assert known[alike].way == "both" and known[alike].saves == 0.1234
    value, why = chosen(how={"fastest_ways": known})
    assert value == "both" and why.startswith("saved 12.3% of a step on this card")
    assert chosen(how={"fastest_ways": known}, data__resolution=512)[0] == "fastest"
    other = replace(gpu, name="another card")
    assert known_ways(tmp_path, CARD, gpu=other, family=family) == {}
    assert known_ways(tmp_path, CARD, gpu=None, family=family) == {}


def test_that_nothing_is_faster_is_known_too() -> None:
    made = plan(request(SDXL, CARD, overrides=LONG))
    known = {steps_alike(made.config): FastestWay(way="plain", saves=0.0, on="2026-11-30")}
    value, why = chosen(how={"fastest_ways": known})
    assert (
        value == "plain" and why == "no other way was faster on this card, measured on 2026-11-30"
    )
