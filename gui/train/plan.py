"""The plan of a draft as the page Train shows it: what is trained, how long it takes, whether it fits.

Input: the JSON of `lora-train plan --json`. Outputs: what plan.html and beside.html show, and the texts of the
fields that the plan fills in. Nothing is computed here but units and widths; what the plan does not say is not shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import mapping, number, sequence

from .. import plan_view
from ..bases import EMBEDDED, RECOMMENDED, title
from ..markup import setting_label
from ..server.templates import render
from ..server.translation import Words
from . import fields
from .messages import message

Values = Mapping[str, Any]

# A training that may take longer than a night is called slow.
SLOW_S = 8 * 3600.0
DAY_S = 24 * 3600.0
# How much longer the bar is than the larger of peak and limit.
_ROOM = 1.04
# What the size that a base is trained in makes of the images, said where the base is chosen.
_OF_BASE = {
    "low-resolution": (
        "{#} of {#} images are smaller than this base is trained at and would be enlarged",
        "What is learned from them is soft: give larger ones, or choose a smaller size.",
    ),
    "blurred": (
        "{#} of {#} images look blurred at this size",
        "Leave them out, or choose a smaller size.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long all of it takes; `text` says why not where that is not known."""

    text: str
    is_slow: bool
    steps: int | None
    hint: str


@dataclass(frozen=True, kw_only=True)
class Length:
    """What makes a number of steps a number of times through the images."""

    epochs_per_step: float
    images: int
    held_out: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of the memory bar, or the limit in it, as a share of its length."""

    css: str
    share: float
    text: str


def plan(values: Values, said: Words) -> Html:
    """Return a plan: one line and what it warns of; numbers and decisions folded."""
    memory, time, settings = (mapping(values, name) for name in ("memory", "time", "settings"))
    return render(
        "train/plan.html",
        said,
        time=duration(values, said),
        corrections=[said.message(str(text)) for text in sequence(time, "corrections")],
        fits=memory.get("fits") is not False,
        fit=fit(values, said),
        remarks=[*_of_images(values, said), *_remarks(values, said)],
        **{name: values.get(name) for name in ("base", "family", "preset", "priority")},
        steps=time.get("steps", "unknown"),
        **_chosen(settings),
        pieces=list(_pieces(memory, said)),
        limit=_limit(memory),
        items=list(_items(memory)),
        disk=_disk(values, said),
        decided=list(_decided(settings, said)),
    )


def beside(values: Values, said: Words) -> Html:
    """Return what Train starts, in the words beside it: how long, how much, how large, on what.

    A try-out comes with the one press that leads to a base of other programs.
    """
    return render(
        "train/beside.html",
        said,
        time=duration(values, said),
        base=str(values.get("base")),
        is_try_out=values.get("base") == EMBEDDED,
        recommended=RECOMMENDED,
        recommended_name=title(RECOMMENDED),
        **_chosen(mapping(values, "settings")),
    )


def filled(values: Values) -> dict[str, str]:
    """Return the texts of the fields that the plan fills in, by key."""
    settings = mapping(values, "settings")
    chosen = {row.key: _value(settings, row.key) for row in fields.planned()}
    # The plan counts the steps, and words the prompts.
    chosen |= {
        fields.STEPS: int(number(mapping(values, "time"), "steps")),
        fields.PROMPTS: sequence(mapping(values, "sampling"), "prompts"),
    }
    return {row.key: fields.as_text(row, chosen[row.key]) for row in fields.planned()}


def length(values: Values) -> Length:
    """Return what the fields of the length are computed with."""
    time = mapping(values, "time")
    return Length(
        epochs_per_step=number(time, "epochs") / number(time, "steps"),
        images=int(number(time, "images")),
        held_out=int(number(time, "held_out")),
        batch=_value(mapping(values, "settings"), "train.batch_size"),
    )


def duration(values: Values, said: Words) -> Time:
    """Return how long all of it takes, as far as that is known; its parts as a hint."""
    time = mapping(values, "time")
    pair, note = _run_s(values), said.message(str(time.get("note", "")))
    if pair is None:
        return Time(text=note, is_slow=False, steps=None, hint="")
    parts = ", ".join(said.message(part) for part in mapping(time, "parts_s"))
    steps = time.get("steps")
    return Time(
        text=_span(*pair, one="About {#}", two="About {#} to {#}", said=said),
        is_slow=is_slow(pair),
        steps=steps if isinstance(steps, int) else None,
        hint=said("{}; counted are {}", note, parts) if parts else "",
    )


def pace(values: Values, said: Words) -> tuple[str, str]:
    """Return whether a plan is good, slow or bad for this machine, and that in a few words."""
    if mapping(values, "memory").get("fits") is False:
        return "bad", said("Does not fit this machine")
    pair = _run_s(values)
    if pair is None:
        return "good", said("Fits this machine")
    span = _span(*pair, one="about {#}", two="about {#} to {#}", said=said)
    if is_slow(pair):
        return "slow", said("Fits, but slow: {text}", span)
    return "good", said("Fits: {text}", span)


def fit(values: Values, said: Words) -> str:
    """Return in a sentence whether it fits."""
    return said.message(plan_view.fit_sentence(mapping(values, "memory")))


def is_slow(run_s: Sequence[float]) -> bool:
    """Return whether a training of this range of seconds may take longer than a night."""
    return max(run_s) > SLOW_S


def _run_s(values: Values) -> tuple[float, float] | None:
    """Return the range of seconds that all of it takes, None where it is not known."""
    ends = sequence(mapping(values, "time"), "run_s")
    pair = [value for value in ends if isinstance(value, int | float)]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _span(low_s: float, high_s: float, *, one: str, two: str, said: Words) -> str:
    low, high = _coarse(low_s), _coarse(high_s)
    return said(two, low, high) if low != high else said(one, low)


def _coarse(seconds: float) -> str:
    """Return a duration as somebody says it who does not know it better."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"


def _chosen(settings: Values) -> dict[str, Any]:
    """Return the choices that are named in sentences."""
    keys = {
        "optimizer": "optimizer.name",
        "rank": "adapter.rank",
        "size_px": "data.resolution",
        "batch": "train.batch_size",
    }
    return {name: _value(settings, key) for name, key in keys.items()}


def _scale(memory: Values) -> float:
    peak, limit = number(memory, "peak_bytes"), number(memory, "limit_bytes")
    return max(peak, limit if math.isfinite(limit) else 0.0) * _ROOM or 1.0


def _pieces(memory: Values, said: Words) -> Iterator[Piece]:
    for part in plan_view.memory_parts(sequence(memory, "items")):
        share = part.size_bytes / _scale(memory)
        yield Piece(css=part.css, share=100 * share, text=said.message(part.text))


def _limit(memory: Values) -> float | None:
    """Return where in the bar the limit is, as a percentage; None where none is known."""
    limit = number(memory, "limit_bytes")
    return 100 * limit / _scale(memory) if math.isfinite(limit) else None


def _items(memory: Values) -> Iterator[tuple[str, float, str]]:
    for row in sequence(memory, "items"):
        if isinstance(row, dict):
            yield str(row.get("name")), number(row, "bytes"), str(row.get("note", ""))


def _disk(values: Values, said: Words) -> str:
    sizes = mapping(values, "disk").items()
    return ", ".join(f"{said.message(name)} {bytes_text(size)}" for name, size in sizes)


def _decided(settings: Values, said: Words) -> Iterator[dict[str, Any]]:
    """Yield the settings that are not at their default, each with its reason."""
    for key in settings:
        row = mapping(settings, key)
        if row.get("origin") != "default":
            value = row.get("value")
            yield {
                "key": key,
                "label": said.message(setting_label(key)),
                "value": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
                "origin": said.message(str(row.get("origin"))),
                "reason": message(str(row.get("reason") or ""), said),
            }


def _of_images(values: Values, said: Words) -> Iterator[dict[str, Any]]:
    """Yield of how many images the planned size makes something that harms the training."""
    images = mapping(values, "images")
    for kind, (what, advice) in _OF_BASE.items():
        count = images.get(kind)
        if isinstance(count, int):
            told = said(what, f"{count:,}", f"{number(images, 'all'):,.0f}")
            yield {"what": told, "advice": said(advice), "severity": "warning"}


def _remarks(values: Values, said: Words) -> Iterator[dict[str, Any]]:
    """Yield what the plan warns of, each with its advice."""
    for row in sequence(values, "remarks"):
        if isinstance(row, dict):
            yield {
                "what": message(str(row.get("what", "")), said),
                "advice": message(str(row.get("advice", "")), said),
                "severity": str(row.get("severity", "note")),
            }


def _value(settings: Values, key: str) -> Any:
    return mapping(settings, key).get("value")
