"""The size of the images where nobody sets it: the largest that fits and ends within the priority's hours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.run_time import MOST_HOURS, image_loss_extent
from lora_trainer.run import prepare
from scripts.plan_tables import machine
from tests.fakes.plans import planned
from tests.fakes.runs import ROOT

FLUX, KLEIN = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.2-klein-base-4B"
SD35 = "stabilityai/stable-diffusion-3.5-medium"
CARDS = {8: "8 GiB (RTX 4060)", 12: "12 GiB (RTX 3060)", 16: "16 GiB (RTX 4060 Ti)"}
CARDS[24] = "24 GiB (RTX 4090)"


def here(card_gib: int) -> Hardware:
    return machine(CARDS[card_gib])


@pytest.mark.parametrize(
    ("base", "card_gib", "side_px"),
    [
        *((SD35, card_gib, 1024) for card_gib in (8, 12)),  # over an hour, of three
        (KLEIN, 12, 768),
        (FLUX, 8, 512),
        (FLUX, 16, 640),  # not the row of 24 GiB, by which it took 7.7 hours
        (FLUX, 24, 1024),
    ],
)
def test_the_largest_that_ends_within_the_hours(base: str, card_gib: int, side_px: int) -> None:
    made = planned(base, here(card_gib))
    origin = made.origins["data.resolution"]
    assert (made.config.data.resolution, origin.layer) == (side_px, "planner")
    assert made.run_time.seconds < MOST_HOURS["balanced"] * 3600
    if side_px == 1024:
        assert origin.reason == f"the size {base} was trained on"
    else:
        larger = planned(base, here(card_gib), overrides={"data.resolution": 1024})
        assert larger.run_time.seconds > MOST_HOURS["balanced"] * 3600
        assert "of balanced's 3 hours with 20 images; 1024 px would take " in origin.reason


def test_it_depends_neither_on_the_dataset_nor_on_a_setting_of_the_users() -> None:
    """A large dataset takes longer at the same size: else its images would be trained smaller on the best GPU."""
    for images in (5, 400):
        made = planned(FLUX, here(16), images=images, samples_per_epoch=images, latents=images)
        assert made.config.data.resolution == 640
    typed = planned(FLUX, here(16), overrides={"data.resolution": 896})
    assert typed.config.data.resolution == 896
    assert planned(None, here(8)).config.data.resolution == 512, "a U-Net has one size"


def test_where_none_ends_within_the_hours_it_is_the_fastest_and_that_is_said() -> None:
    slow: dict[str, Any] = {"train.steps": 6000}
    made = planned(FLUX, here(8), overrides=slow)
    reason = made.origins["data.resolution"].reason
    assert made.config.data.resolution == 512
    assert "hours with 20 images, balanced is meant for 3; 1024 px would take" in reason
    assert "512 px" not in reason


def test_images_are_placed_at_the_size_that_the_plan_chose() -> None:
    overrides = {"base.model": FLUX}
    request = prepare.Request(dataset=ROOT / "datasets/example", overrides=overrides)
    found = prepare.prepare(request, hardware=here(8))
    assert found.config.data.resolution == 512
    for record in (*found.trained, *found.held_out):
        bucket = record.placement.bucket
        assert 400**2 < bucket.width_px * bucket.height_px <= 512**2
    assert set(found.plan.images_at_once) <= set(found.inputs.buckets)
    whole = prepare.prepare(request, hardware=here(24))
    assert whole.config.data.resolution == 1024 == whole.facts.resolution_px
    assert {record.name for record in found.dataset.records} == {
        record.name for record in (*found.trained, *found.held_out)
    }


@pytest.mark.parametrize(
    ("steps", "images", "measured"),
    [
        (60, 20, (20, 1)),
        (60, 6, (6, 3)),
        (1500, 100, (20, 1)),
        (3000, 20, (20, 1)),
        (9000, 100, (48, 1)),
        (9000, 30, (30, 3)),
    ],
)
def test_what_is_measured_at_the_end_takes_a_hundredth_of_the_training(
    steps: int, images: int, measured: tuple[int, int]
) -> None:
    config: Any = SimpleNamespace(train=SimpleNamespace(steps=steps, batch_size=1))
    assert image_loss_extent(config, images) == measured
