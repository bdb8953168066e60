"""The plan of a draft in words and as a bar: what is trained, how long it takes, whether it fits.

Input: the JSON of `lora-train plan --json`. Output: escaped markup. Nothing is computed here but
units and widths; what the plan does not say is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.output.history import mapping, number, sequence
from lora_trainer.output.markup import Html, join, tag
from lora_trainer.output.wording import bytes_text, duration_text

Values = Mapping[str, Any]

_PARTS = (
    ("program", "program", ("runtime",)),
    ("base", "base model", ("base weights", "VAE weights", "text encoder weights")),
    ("adapter", "LoRA and optimizer", ("adapter weights", "adapter gradients", "optimizer states")),
    ("margin", "margin of error", ("allocator slack",)),
)
_REST = ("work", "working memory")
_PHASES = {
    "images": "preparing images",
    "texts": "preparing captions",
    "training": "training",
    "sampling": "drawing samples",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of the memory bar."""

    css: str
    label: str
    size_bytes: float


def sentence(values: Values) -> Html:
    """Return in a sentence or two what will be trained, for how long, and where it comes from."""
    settings = mapping(values, "settings")
    chosen = ", ".join(
        text
        for text in (
            f"{values.get('base')} ({values.get('family')})",
            f"rank {_value(settings, 'adapter.rank')}",
            f"{_value(settings, 'data.resolution')} px",
            f"{_value(settings, 'train.batch_size')} images a step",
            str(_value(settings, "optimizer.name")),
            f"{int(number(mapping(values, 'time'), 'steps')):,} steps",
        )
    )
    preset = f"Preset {values.get('preset')}, {values.get('priority')}"
    return tag("p", tag("b", f"{preset}: "), f"{chosen}.", class_="choice")


def duration(values: Values) -> Html:
    """Return how long the training takes, as far as that is known."""
    time = mapping(values, "time")
    pair = [value for value in sequence(time, "seconds_per_step") if isinstance(value, int | float)]
    if len(pair) != 2:
        return tag("p", str(time.get("note", "")))
    low, high = (duration_text(value * number(time, "steps")) for value in pair)
    return tag("p", tag("b", f"About {low} to {high}"), f" ({time.get('note', '')}).")


def memory_bar(values: Values) -> Html:
    """Return the memory at the peak as a bar with the limit, and the same in words."""
    memory = mapping(values, "memory")
    peak, limit = number(memory, "peak_bytes"), number(memory, "limit_bytes")
    parts = list(_parts(sequence(memory, "items")))
    scale = max(peak, limit if math.isfinite(limit) else 0.0) * 1.04 or 1.0
    pieces = (
        tag("i", class_=part.css, style=f"width:{part.size_bytes / scale:.2%}", title=_label(part))
        for part in parts
    )
    line = (
        tag("b", class_="limit", style=f"left:{limit / scale:.2%}", title="the limit")
        if math.isfinite(limit)
        else None
    )
    said = _fit(memory)
    return tag(
        "div",
        tag("p", said, class_="fit" if memory.get("fits") is not False else "fit error"),
        tag("div", *pieces, line, class_="bar", role="img", aria_label=said),
        tag(
            "p",
            *(tag("span", tag("i", class_=part.css), _label(part)) for part in parts),
            class_="legend",
        ),
        class_="memory",
    )


def remarks(values: Values) -> Html:
    """Return what the plan warns of, each with its advice."""
    found = [row for row in sequence(values, "remarks") if isinstance(row, dict)]
    return join(
        tag(
            "p",
            f"{row.get('what', '')}. ",
            tag("span", str(row.get("advice", "")), class_="quiet"),
            class_=f"notice {row.get('severity', 'note')}",
        )
        for row in found
    )


def _value(settings: Values, key: str) -> Any:
    return mapping(settings, key).get("value")


def _parts(items: Sequence[Any]) -> Iterator[Part]:
    rows = [row for row in items if isinstance(row, dict)]
    named = {name for _, _, names in _PARTS for name in names}
    for css, label, names in (*_PARTS[:-1], (*_REST, None), _PARTS[-1]):
        size = sum(
            number(row, "bytes")
            for row in rows
            if (row.get("name") in names if names is not None else row.get("name") not in named)
        )
        if size:
            yield Part(css=css, label=label, size_bytes=size)


def _label(part: Part) -> str:
    return f"{part.label} {bytes_text(part.size_bytes)}"


def _fit(memory: Values) -> str:
    peak = bytes_text(number(memory, "peak_bytes"))
    phase = _PHASES.get(str(memory.get("phase")), str(memory.get("phase")))
    if memory.get("limit_bytes") is None:
        return f"Needs {peak} at most, while {phase}; no limit is known."
    limit = bytes_text(number(memory, "limit_bytes"))
    if memory.get("fits"):
        return f"Fits: needs {peak} of {limit} at most, while {phase}."
    return f"Does not fit: needs {peak}, and {limit} are free."
