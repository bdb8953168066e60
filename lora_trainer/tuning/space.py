"""What `tune` varies: ranges and choices of settings around a plan, or those that the user names.

Inputs: a plan and its origins, or the text of `--vary`. Outputs: dimensions, which turn a value that was proposed
into settings. No torch, no Optuna.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import (
    build_run_config,
    check_keys,
    flatten,
    parse_assignment,
    setting_info,
    value_of,
)
from lora_trainer.config.layers import Origin
from lora_trainer.config.running import RunConfig

# A learning rate may be this many times smaller or larger than the planned one.
RATE_FACTOR = 8.0
RANK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
STEPS_FACTORS = (0.5, 0.75, 1.0, 1.5)
SCHEDULES = ("constant", "linear", "cosine", "one_cycle")
MOST_RANK = 1024
TIMESTEPS = "timesteps"
AS_PLANNED = "as planned"
# Means of the logit-normal density by where it puts the most timesteps.
FOCUS: Mapping[str, float] = {"less noise": -0.7, "the middle": 0.0, "more noise": 0.7}
# Proposed numbers are rounded to so many digits, so that a settings file can be read.
DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Span:
    """A setting between two positive numbers, proposed evenly over its logarithm."""

    name: str
    """The setting's key."""
    low: float
    high: float

    def settings(self, value: Any) -> Mapping[str, Any]:
        """Return the settings of a proposed value."""
        return {self.name: float(f"{float(value):.{DIGITS}g}")}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A few values, each of which may stand for several settings."""

    name: str
    """The setting's key, or a word where there are several."""
    by_label: Mapping[str, Mapping[str, Any]]

    def settings(self, value: Any) -> Mapping[str, Any]:
        """Return the settings of a proposed label."""
        return self.by_label[str(value)]


Dimension = Span | Choices


def around(config: RunConfig, origins: Mapping[str, Origin]) -> tuple[Dimension, ...]:
    """Return what is varied around a plan: rate, rank, steps, schedule and timesteps.

    A setting that the user gave stays as it is, and so does one without effect in this plan. Raises RequestError
    where nothing is left.
    """
    dimensions = tuple(
        dimension
        for dimension in _usual(config)
        if not any(_is_fixed(key, config, origins) for key in keys_of(dimension))
    )
    if not dimensions:
        raise RequestError(
            "every setting that tune varies by itself is given already",
            fix="leave some of them out, or name what to vary: --vary optimizer.learning_rate=1e-5..1e-3",
        )
    return dimensions


def _usual(config: RunConfig) -> Iterator[Dimension]:
    rate = _own_rate(config)
    yield Span(name=rate, low=_at(config, rate) / RATE_FACTOR, high=_at(config, rate) * RATE_FACTOR)
    ranks = (round(config.adapter.rank * factor) for factor in RANK_FACTORS)
    yield _values("adapter.rank", sorted({min(max(rank, 1), MOST_RANK) for rank in ranks}))
    lengths = (round(config.train.steps * factor) for factor in STEPS_FACTORS)
    yield _values("train.steps", sorted({max(steps, 1) for steps in lengths}))
    planned = config.optimizer.schedule
    yield _values("optimizer.schedule", list(dict.fromkeys((planned, *SCHEDULES))))
    focus = {
        label: {"objective.timestep_sampling": "logit_normal", "objective.logit_mean": mean}
        for label, mean in FOCUS.items()
    }
    as_planned: dict[str, Any] = {"objective.timestep_sampling": config.objective.timestep_sampling}
    if config.objective.timestep_sampling == "logit_normal":
        as_planned["objective.logit_mean"] = config.objective.logit_mean
    yield Choices(name=TIMESTEPS, by_label={AS_PLANNED: as_planned, **focus})


def _own_rate(config: RunConfig) -> str:
    """Return the setting of the learning rate, or of its factor where the optimizer finds the rate itself."""
    factor = "optimizer.prodigy_d_coef"
    return "optimizer.learning_rate" if setting_info(factor).unused(flatten(config)) else factor


def _at(config: RunConfig, key: str) -> float:
    return float(value_of(config, key))


def _values(key: str, values: Sequence[Any]) -> Choices:
    return Choices(name=key, by_label={f"{value}": {key: value} for value in values})


def keys_of(dimension: Dimension) -> tuple[str, ...]:
    """Return the settings that a dimension changes."""
    if isinstance(dimension, Span):
        return (dimension.name,)
    return tuple(dict.fromkeys(key for each in dimension.by_label.values() for key in each))


def _is_fixed(key: str, config: RunConfig, origins: Mapping[str, Origin]) -> bool:
    origin = origins.get(key)
    if origin is not None and origin.is_users:
        return True
    # A density's mean has an effect with that density, which its choice brings along.
    return key != "objective.logit_mean" and bool(setting_info(key).unused(flatten(config)))


def read_vary(texts: Sequence[str], config: RunConfig) -> tuple[Dimension, ...]:
    """Return the dimensions of `--vary KEY=LOW..HIGH` and `--vary KEY=A,B,C`; raises RequestError."""
    dimensions: list[Dimension] = []
    for text in texts:
        dimension = _read_one(text, config)
        if any(dimension.name == other.name for other in dimensions):
            raise RequestError(f"{dimension.name} is varied twice", fix="give it once")
        dimensions.append(dimension)
    return tuple(dimensions)


def _read_one(text: str, config: RunConfig) -> Dimension:
    written, equals, values = text.partition("=")
    key = written.strip()
    form = RequestError(
        f"--vary {text} cannot be read",
        fix="write KEY=LOW..HIGH or KEY=A,B,C, such as adapter.rank=8,16,32",
    )
    if not equals or not values.strip():
        raise form
    check_keys({key: None})
    low, dots, high = values.partition("..")
    if dots:
        span = Span(name=key, low=_positive(low, form), high=_positive(high, form))
        if not span.low < span.high:
            raise RequestError(
                f"--vary {text}: {low.strip()} is not below {high.strip()}",
                fix="give the lower end first",
            )
        _refuse(key, (span.low, span.high), config)
        return span
    parsed = [parse_assignment(f"{key}={value.strip()}")[1] for value in values.split(",")]
    if len(parsed) < 2:
        raise RequestError(
            f"--vary {text} gives one value, and nothing could be compared",
            fix=f"give several, or set it: --set {text}",
        )
    _refuse(key, parsed, config)
    return _values(key, list(dict.fromkeys(parsed)))


def _refuse(key: str, values: Sequence[Any], config: RunConfig) -> None:
    """Raise RequestError for a value that the setting cannot have."""
    for value in values:
        build_run_config({**flatten(config), key: value})


def _positive(text: str, form: RequestError) -> float:
    try:
        value = float(text)
    except ValueError:
        raise form from None
    if not 0 < value < math.inf:
        raise form
    return value
