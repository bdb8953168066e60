"""The answers of `check --json` and `plan --json` as markup, and the table of all settings.

Inputs: the JSON objects, whose texts come from files of anybody; the settings' declarations.
Outputs: escaped markup, plain rows. A value that is missing shows as such; nothing is computed here
but units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.config import all_settings
from lora_trainer.output.history import mapping, number, sequence
from lora_trainer.output.markup import Html, table, tag
from lora_trainer.output.wording import bytes_text, duration_text

SETTING_COLUMNS = ("setting", "default", "unit", "what it does")
Values = Mapping[str, Any]


def setting_rows() -> list[list[str]]:
    """Return key, default, unit and documentation of every setting, in declaration order."""
    return [[info.key, _plain(info.default), info.unit, info.doc] for info in all_settings()]


def report_html(values: Values) -> Html:
    """Return the report of a dataset: score with its parts, buckets, findings with advice."""
    parts = ", ".join(
        f"{name} {number(mapping(values, 'parts'), name):.2f}" for name in mapping(values, "parts")
    )
    buckets = ", ".join(f"{name} x{count}" for name, count in mapping(values, "buckets").items())
    findings = [finding for finding in sequence(values, "findings") if isinstance(finding, dict)]
    items = (
        tag(
            "li",
            tag("b", f"{finding['file']}: ") if finding.get("file") else None,
            f"{finding.get('what', '')}. ",
            tag("span", str(finding.get("advice", "")), class_="quiet"),
            class_=str(finding.get("severity", "note")),
        )
        for finding in findings
    )
    return tag(
        "div",
        tag("h2", f"{values.get('images')} images, score {number(values, 'score'):.2f} of 1"),
        tag("p", parts, class_="quiet"),
        tag("p", f"Trained in {buckets}."),
        tag("ul", *items, class_="problems") if findings else tag("p", "Nothing to remark."),
    )


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
