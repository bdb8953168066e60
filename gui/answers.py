"""Refusals and remarks as markup, and the answer of `plan --json` item by item.

Inputs: sentences, and the JSON object, whose texts come from files of anybody. Output: escaped
markup. A value that is missing shows as such; nothing is computed here but units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.output.history import mapping, number, sequence
from lora_trainer.output.markup import Html, table, tag
from lora_trainer.output.wording import bytes_text, duration_text

Values = Mapping[str, Any]


def plan_html(values: Values) -> Html:
    """Return the plan: fit, time and disk in sentences, memory by item, decisions with reasons."""
    memory, time = mapping(values, "memory"), mapping(values, "time")
    preset = (
        f"{values.get('base')}, preset {values.get('preset')}, priority {values.get('priority')}"
    )
    disk = ", ".join(f"{name} {bytes_text(size)}" for name, size in mapping(values, "disk").items())
    return tag(
        "div",
        tag("h2", _fit(memory)),
        tag("p", f"{preset}."),
        tag("p", _duration(time)),
        tag("p", f"Disk: {disk}.") if disk else None,
        table(("memory at the peak", "size", ""), _memory_rows(memory)),
        tag("h3", "Settings that are not at their default"),
        table(("setting", "value", "from", "why"), _decided(mapping(values, "settings"))),
    )


def error_html(line: str) -> Html:
    """Return a refusal, an empty string for none."""
    return tag("p", line, class_="error notice") if line else Html("")


def note_html(line: str) -> Html:
    """Return a remark, an empty string for none."""
    return tag("p", line, class_="notice") if line else Html("")


def _fit(memory: Values) -> str:
    peak = bytes_text(number(memory, "peak_bytes"))
    limit = memory.get("limit_bytes")
    if limit is None:
        return f"Needs {peak} at its peak; no limit is known"
    verdict = "fits in" if memory.get("fits") else "does not fit in"
    return f"Needs {peak} at its peak: {verdict} {bytes_text(number(memory, 'limit_bytes'))}"


def _duration(time: Values) -> str:
    length = f"{time.get('steps')} steps, {number(time, 'epochs'):.1f} epochs"
    pair = [value for value in sequence(time, "seconds_per_step") if isinstance(value, int | float)]
    if len(pair) != 2:
        return f"{length}. {time.get('note', '')}"
    low, high = (duration_text(value * number(time, "steps")) for value in pair)
    return f"{length}: about {low} to {high} ({time.get('note', '')})."


def _memory_rows(memory: Values) -> Iterator[tuple[str, str, str]]:
    for item in sequence(memory, "items"):
        if isinstance(item, dict):
            yield (
                str(item.get("name")),
                bytes_text(number(item, "bytes")),
                str(item.get("note", "")),
            )


def _decided(settings: Values) -> Iterator[tuple[str, str, str, str]]:
    for key in settings:
        row = mapping(settings, key)
        if row.get("origin") != "default":
            reason = str(row.get("reason") or "")
            yield key, _plain(row.get("value")), str(row.get("origin")), reason


def _plain(value: Any) -> str:
    """Return a value as it is typed in `section.key=value`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
