"""What `tune` varies: around a plan, and as people write it."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from lora_trainer.common.errors import RequestError
from lora_trainer.config.layers import COMMAND_LINE, Origin
from lora_trainer.tuning.space import Choices, Dimension, Span, around, keys_of, read_vary
from tests.fakes.plans import planned


def test_the_usual_dimensions_lie_around_the_plan() -> None:
    plan = planned()
    space = around(plan.config, {})
    rate, rank, steps, schedule, timesteps = space
    assert isinstance(rate, Span) and rate.name == "optimizer.learning_rate"
    planned_rate = plan.config.optimizer.learning_rate
    assert (rate.low, rate.high) == pytest.approx((planned_rate / 8, planned_rate * 8))
    assert rate.settings(1.23456e-4) == {"optimizer.learning_rate": 1.23e-4}
    assert isinstance(rank, Choices) and isinstance(steps, Choices)
    r, n = plan.config.adapter.rank, plan.config.train.steps
    assert [each["adapter.rank"] for each in rank.by_label.values()] == [
        r // 4, r // 2, r, 2 * r, 4 * r,
    ]  # fmt: skip
    assert {"train.steps": n} in steps.by_label.values()
    assert isinstance(schedule, Choices) and isinstance(timesteps, Choices)
    assert next(iter(schedule.by_label)) == plan.config.optimizer.schedule
    assert set(keys_of(timesteps)) == {
        "objective.timestep_sampling", "objective.logit_mean",
    }  # fmt: skip
    as_json = TypeAdapter(tuple[Dimension, ...])
    assert as_json.validate_json(as_json.dump_json(space)) == space


def test_what_the_user_gave_and_what_has_no_effect_stays() -> None:
    plan = planned(overrides={"adapter.rank": 8, "optimizer.name": "schedulefree_adamw"})
    by_user = Origin(layer=COMMAND_LINE)
    names = [each.name for each in around(plan.config, {"adapter.rank": by_user})]
    assert names == ["optimizer.learning_rate", "train.steps", "timesteps"]
    plan = planned(overrides={"optimizer.name": "prodigy", "optimizer.learning_rate": 1.0})
    assert around(plan.config, {})[0].name == "optimizer.prodigy_d_coef"
    everything = {key: by_user for each in around(plan.config, {}) for key in keys_of(each)}
    with pytest.raises(RequestError, match="every setting that tune varies"):
        around(plan.config, everything)


def test_ranges_and_choices_are_read_as_written() -> None:
    config = planned().config
    texts = ("optimizer.learning_rate=1e-5..1e-3", "adapter.rank=8,16", "adapter.dora=true,false")
    rate, rank, dora = read_vary(texts, config)
    assert rate == Span(name="optimizer.learning_rate", low=1e-5, high=1e-3)
    assert rank.settings("16") == {"adapter.rank": 16}
    assert dora.settings("True") == {"adapter.dora": True}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["adapter.rank"], "cannot be read"),
        (["adapter.rnak=1,2"], "unknown setting 'adapter.rnak'"),
        (["adapter.rank=8"], "one value"),
        (["adapter.rank=8,0"], "only a whole number from 1 to 1,024"),
        (["optimizer.learning_rate=1e-3..1e-5"], "not below"),
        (["optimizer.learning_rate=0..1"], "cannot be read"),
        (["optimizer.learning_rate=1..5000"], "only a number above 0 to 10"),
        (["adapter.rank=8,16", "adapter.rank=4,8"], "varied twice"),
    ],
)
def test_what_cannot_be_varied_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_vary(texts, planned().config)
