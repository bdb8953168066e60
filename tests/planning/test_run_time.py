"""How long a whole run takes: every part counted, sample images kept in proportion."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.planning.plan import Plan
from tests.fakes.plans import WITHOUT_CARD, middle, planned

STEPS, DRAWN, VALIDATED = "train.steps", "sampling.every_steps", "train.validate_every_steps"
SIZE, MORE = "data.resolution", "data.more_resolutions"


def timed(overrides: dict[str, Any] | None = None, *, held_out: int = 2) -> Plan:
    return planned(overrides=overrides, held_out_count=held_out)


def part_s(made: Plan, part: str) -> float:
    return middle(made.run_time.parts[part])


def test_a_run_is_more_than_its_steps() -> None:
    made, parts = timed(), ["start", "caching", "steps", "validation", "sample images", "saves"]
    assert list(made.run_time.parts) == parts
    assert all(0 < low < high for low, high in made.run_time.parts.values())
    assert made.run_time.seconds == pytest.approx(sum(part_s(made, part) for part in parts))
    on_processor = planned(None, WITHOUT_CARD, held_out_count=2)
    assert on_processor.run_time.low_s > on_processor.steps * on_processor.seconds_per_step[0]


def test_parts_that_are_switched_off_take_no_time() -> None:
    assert timed({DRAWN: 0}).run_time.parts["sample images"] == (0, 0)
    assert timed(held_out=0).run_time.parts["validation"] == (0, 0)
    assert timed({VALIDATED: 0}).run_time.parts["validation"] == (0, 0)


def test_validation_and_samples_are_counted_by_their_passes() -> None:
    asked = {STEPS: 100, VALIDATED: 50}
    two, four = (part_s(timed(asked, held_out=count), "validation") for count in (2, 4))
    assert four == pytest.approx(2 * two)
    forward_s = two / (3 * 8 * 2)  # three times eight noise levels of two images
    drawing = {STEPS: 100, DRAWN: 50, "sampling.steps": 10}
    count, guidance = "sampling.prompts_from_captions", "sampling.guidance_scale"
    of_four, of_two, unguided = (
        part_s(timed({**drawing, **more}), "sample images")
        for more in ({count: 4}, {count: 2}, {guidance: 1.0, count: 4})
    )
    assert of_four == pytest.approx(2 * of_two)
    assert of_four - unguided == pytest.approx(3 * 4 * 10 * forward_s, rel=0.01), "guided: twice"


def test_samples_are_drawn_less_often_where_they_would_take_much_of_the_run() -> None:
    quick, dear = timed(), timed({"sampling.steps": 1000})
    assert quick.config.sampling.every_steps == quick.config.output.save_every_steps
    assert part_s(quick, "sample images") < max(180, 0.15 * part_s(quick, "steps"))
    assert dear.config.sampling.every_steps == 5 * dear.config.output.save_every_steps == dear.steps
    assert "too much" in dear.origins[DRAWN].reason
    asked = timed({"sampling.steps": 1000, DRAWN: 100})
    assert asked.config.sampling.every_steps == 100


def test_a_step_of_several_resolutions_is_their_mean() -> None:
    one, other, both = (
        timed({SIZE: side, MORE: more}).seconds_per_step[0]
        for side, more in ((1024, []), (512, []), (1024, [512]))
    )
    assert both == pytest.approx((one + other) / 2)
