"""How long a whole run takes: every part counted, sample images kept in proportion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.run_time import FREE_SAMPLES_S, SAMPLES_SHARE, VALIDATION_QUANTILES
from scripts.plan_tables import planned as release_planned
from tests.planning.test_plan import WITHOUT_CARD, request


def planned(*, held_out: int = 2, **overrides: Any) -> Plan:
    typed = {key.replace("__", "."): value for key, value in overrides.items()}
    given = request(overrides=typed, buckets=())
    return plan(replace(given, held_out=held_out))


def middle(made: Plan, part: str) -> float:
    low, high = made.run_time.parts[part]
    return float((low * high) ** 0.5)


def test_a_run_is_more_than_its_steps() -> None:
    made = planned()
    assert list(made.run_time.parts) == [
        "start",
        "caching",
        "steps",
        "validation",
        "sample images",
        "saves",
    ]
    low, high = made.seconds_per_step
    assert made.run_time.parts["steps"] == (made.steps * low, made.steps * high)
    for part in made.run_time.parts:
        assert 0 < made.run_time.parts[part][0] < made.run_time.parts[part][1]
    assert made.run_time.seconds == pytest.approx(
        sum(middle(made, part) for part in made.run_time.parts)
    )


def test_what_is_switched_off_takes_no_time() -> None:
    assert planned(sampling__every_steps=0).run_time.parts["sample images"] == (0, 0)
    assert planned(held_out=0).run_time.parts["validation"] == (0, 0)
    assert planned(train__validate_every_steps=0).run_time.parts["validation"] == (0, 0)


def test_validation_and_samples_are_counted_by_their_passes() -> None:
    validated = planned(train__steps=100, train__validate_every_steps=50)
    passes = 3 * VALIDATION_QUANTILES * 2
    forward_s = middle(validated, "validation") / passes
    assert middle(
        planned(held_out=4, train__steps=100, train__validate_every_steps=50), "validation"
    ) == (pytest.approx(2 * passes * forward_s))
    drawing = {"train__steps": 100, "sampling__every_steps": 50, "sampling__steps": 10}
    four, two = (
        middle(planned(sampling__prompts_from_captions=count, **drawing), "sample images")
        for count in (4, 2)
    )
    assert four == pytest.approx(2 * two)
    plain = middle(planned(sampling__guidance_scale=1.0, **drawing), "sample images")
    assert four - plain == pytest.approx(3 * 4 * 10 * forward_s, rel=0.01), "guided: twice"


def test_flux_is_guided_in_one_pass() -> None:
    flux, chroma = (
        release_planned(source, "24 GiB (RTX 4090)", "balanced")
        for source in ("black-forest-labs/FLUX.1-dev", "lodestones/Chroma1-HD")
    )
    drawn = [
        middle(made, "sample images")
        / (
            made.config.sampling.steps
            * (1 + -(-made.steps // int(made.config.sampling.every_steps)))
        )
        for made in (flux, chroma)
    ]
    # FLUX.1 streams 20 blocks there, Chroma fewer, so a prediction of one takes a little longer.
    assert drawn[1] == pytest.approx(2 * drawn[0], rel=0.15)


def test_samples_are_drawn_less_often_where_they_would_take_much_of_the_run() -> None:
    quick = planned()
    assert quick.config.sampling.every_steps == quick.config.output.save_every_steps
    assert middle(quick, "sample images") < max(
        FREE_SAMPLES_S, SAMPLES_SHARE * middle(quick, "steps")
    )
    dear = planned(sampling__steps=1000)
    assert dear.config.sampling.every_steps == 5 * dear.config.output.save_every_steps == dear.steps
    assert "too much" in dear.origins["sampling.every_steps"].reason
    asked = planned(sampling__steps=1000, sampling__every_steps=100)
    assert asked.config.sampling.every_steps == 100


def test_a_step_of_several_resolutions_is_their_mean() -> None:
    one, other, both = (
        planned(data__resolution=side, data__more_resolutions=more).seconds_per_step[0]
        for side, more in ((1024, []), (512, []), (1024, [512]))
    )
    assert both == pytest.approx((one + other) / 2)


def test_on_a_processor_too() -> None:
    made = plan(replace(request(hardware=WITHOUT_CARD, tier="cpu"), held_out=2))
    assert made.run_time.low_s > made.steps * made.seconds_per_step[0]
