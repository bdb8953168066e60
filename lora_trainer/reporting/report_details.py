"""The report's tables: problems, dataset, settings with their origin, timings, environment.

Input: a RunHistory. Output: `Html`. Everything is shown as run.json and the events have it; what was
not recorded is said to be so.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lora_trainer.common.wording import bytes_text, duration_text, step_seconds_text
from lora_trainer.config.config import all_settings
from lora_trainer.reporting.charts import Html, join, table, tag
from lora_trainer.reporting.console import PHASES
from lora_trainer.reporting.history import Row, RunHistory, mapping, number, sequence

_SEVERITIES = ("error", "warning", "note")


def problems(history: RunHistory) -> Html:
    """Return all that was skipped, clamped or retried; equal entries are one row with a count."""
    keys = ("severity", "what", "file", "fix", "code")
    counts = Counter(tuple(str(row.get(key) or "") for key in keys) for row in history.problems)
    if not counts:
        return tag("p", "Nothing was skipped, clamped or retried.", class_="quiet")
    ordered = sorted(counts.items(), key=lambda entry: _rank(entry[0][0]))
    rows = [
        (
            _severity(severity),
            f"{what} (\u00d7{count})" if count > 1 else what,
            _code(file),
            fix,
            _code(code),
        )
        for (severity, what, file, fix, code), count in ordered
    ]
    return table(("severity", "what", "file", "what to do", "code"), rows, class_="records")


def _rank(severity: str) -> int:
    return _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)


def _severity(severity: str) -> Html:
    return tag("span", severity, class_=severity if severity in _SEVERITIES else None)


def _code(text: str) -> Html | None:
    return tag("code", text) if text else None


def dataset(history: RunHistory) -> Html:
    """Return the images' score with its parts, the buckets and the findings with advice."""
    data = mapping(history.run, "dataset")
    if not data:
        return tag("p", "No dataset was recorded.", class_="quiet")
    held_out = [str(name) for name in sequence(data, "held_out")]
    summary = [f"{_count(number(data, 'images'))} images in {data.get('name', 'unknown')}"]
    if held_out:
        summary.append(f"held out for validation: {', '.join(held_out)}")
    buckets = mapping(data, "buckets")
    return join(
        (
            tag("p", "; ".join(summary), "."),
            tag(
                "div",
                _titled("Score", table(("part", "0 to 1", ""), _scores(data), class_="numbers")),
                _titled(
                    "Buckets", table(("size, px", "images", ""), _shares(buckets), class_="numbers")
                ),
                class_="columns",
            ),
            _titled("Findings", _findings(data)),
        )
    )


def _titled(title: str, content: Html) -> Html:
    return tag("div", tag("h3", title), content)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "an unknown number of"


def _scores(data: Row) -> Iterator[tuple[Html, str, Html]]:
    parts = mapping(data, "parts")
    scores = {name.replace("_", " "): number(parts, name) for name in parts}
    for name, score in {"overall": number(data, "score"), **scores}.items():
        score_text = f"{score:.2f}" if math.isfinite(score) else "not measured"
        yield tag("b" if name == "overall" else "span", name), score_text, _meter(score)


def _shares(buckets: Row) -> Iterator[tuple[str, str, Html]]:
    counts = {name: number(buckets, name) for name in buckets}
    most = max((count for count in counts.values() if math.isfinite(count)), default=1.0)
    for name, count in sorted(counts.items(), key=lambda entry: -entry[1]):
        yield name.replace("x", " \u00d7 "), _count(count), _meter(count / most)


def _meter(fraction: float) -> Html:
    percent = 100 * min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 0.0
    return tag("span", tag("i", style=f"width:{percent:.0f}%"), class_="bar")


def _findings(data: Row) -> Html:
    findings = [finding for finding in sequence(data, "findings") if isinstance(finding, dict)]
    if not findings:
        return tag("p", "None.", class_="quiet")
    findings.sort(
        key=lambda finding: (_rank(str(finding.get("severity"))), str(finding.get("file") or ""))
    )
    rows = [
        (
            _severity(str(finding.get("severity", ""))),
            _code(str(finding.get("file") or "")),
            str(finding.get("what", "")),
            str(finding.get("advice", "")),
        )
        for finding in findings
    ]
    return table(("severity", "file", "what", "advice"), rows, class_="records")


def settings(history: RunHistory) -> Html:
    """Return value, origin and reason of every setting, those at their default folded away."""
    values, origins = mapping(history.run, "settings"), mapping(history.run, "origins")
    if not values:
        return tag("p", "No settings were recorded.", class_="quiet")
    infos = {info.key: info for info in all_settings()}
    defaults = {key: json.loads(json.dumps(info.default)) for key, info in infos.items()}
    units = {key: info.unit for key, info in infos.items()}
    head = ("setting", "value", "origin", "reason")
    differing = [key for key in values if key not in defaults or values[key] != defaults[key]]
    rest = [key for key in values if key not in differing]
    rows = {
        key: _setting(key, values[key], unit=units.get(key, ""), origin=mapping(origins, key))
        for key in values
    }
    folded = tag("summary", f"{len(rest)} settings at their default")
    return join(
        (
            table(head, [rows[key] for key in differing], class_="records settings"),
            tag(
                "details",
                folded,
                table(head, [rows[key] for key in rest], class_="records settings"),
            )
            if rest
            else None,
        )
    )


def _setting(key: str, value: Any, *, unit: str, origin: Row) -> tuple[Html, str, str, str]:
    text = value_text(value)
    with_unit = (
        f"{text} {unit}"
        if unit and isinstance(value, int | float) and not isinstance(value, bool)
        else text
    )
    return (
        tag("code", key),
        with_unit,
        str(origin.get("layer", "")),
        str(origin.get("reason") or ""),
    )


def value_text(value: Any) -> str:
    """Return a JSON value in words: `on`, `off`, `none`, lists with commas."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(value_text(entry) for entry in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def timings(history: RunHistory) -> Html:
    """Return where the time went (steps, waiting for data, saves, phases) and the memory taken."""
    rows = [*_step_timings(history), *_memory(history)]
    phases = sorted(history.phase_seconds.items(), key=lambda entry: -entry[1])
    total_s = sum(history.phase_seconds.values())
    phase_rows = [
        (PHASES.get(name, name), duration_text(seconds), _meter(seconds / total_s))
        for name, seconds in phases
    ]
    return tag(
        "div",
        _titled("Steps", table(("figure", "value"), rows, class_="numbers")),
        _titled("Phases", table(("phase", "time", ""), phase_rows, class_="numbers")),
        class_="columns",
    )


def _step_timings(history: RunHistory) -> Iterator[tuple[str, str]]:
    seconds = sorted(row.seconds for row in history.steps if math.isfinite(row.seconds))
    if not seconds:
        return
    yield "step, median", step_seconds_text(statistics.median(seconds))
    yield "step, slowest of 20", step_seconds_text(seconds[math.ceil(0.95 * len(seconds)) - 1])
    yield "share of waiting for data", f"{100 * data_wait_fraction(history):.1f} %"
    batch = number(history.started, "batch_size")
    if math.isfinite(batch):
        yield "images per second of steps", f"{batch * len(seconds) / sum(seconds):.1f}"
    saves = [mark.fields for mark in history.marks if mark.kind == "saved"]
    if saves:
        yield (
            f"saves, {len(saves)} together",
            duration_text(math.fsum(number(row, "seconds") for row in saves)),
        )


def data_wait_fraction(history: RunHistory) -> float:
    """Return which share of the steps' time the device waited for data."""
    rows = [
        row
        for row in history.steps
        if math.isfinite(row.seconds) and math.isfinite(row.data_wait_s)
    ]
    total_s = math.fsum(row.seconds for row in rows)
    return math.fsum(row.data_wait_s for row in rows) / total_s if total_s else 0.0


_MEMORY = {
    "vram_bytes": "device memory in tensors, highest",
    "vram_reserved_bytes": "device memory reserved, highest",
    "vram_used_bytes": "whole GPU in use, highest",
    "host_bytes": "memory of the process, highest",
}


def _memory(history: RunHistory) -> Iterator[tuple[str, str]]:
    peaks = {name: _highest(getattr(row, name) for row in history.steps) for name in _MEMORY}
    for name, text in _MEMORY.items():
        if peaks[name]:
            yield text, bytes_text(peaks[name])
    memory = mapping(mapping(history.run, "plan"), "memory")
    predicted = number(memory, "peak_bytes")
    if not predicted > 0:
        return
    yield "memory, predicted peak", bytes_text(predicted)
    context = sum(
        number(item, "bytes")
        for item in sequence(memory, "items")
        if isinstance(item, dict) and item.get("name") == "runtime"
    )
    reserved = peaks["vram_reserved_bytes"]
    measured = reserved + context if reserved else peaks["host_bytes"]
    if measured:
        yield "predicted over measured", f"{100 * (predicted / measured - 1):+.0f} %"


def _highest(figures: Iterable[float]) -> float:
    return max((figure for figure in figures if figure > 0), default=0.0)


def environment(history: RunHistory) -> Html:
    """Return versions, hardware and the command, as run.json has them."""
    rows = [
        (key, _environment_value(key, value))
        for key, value in flat(mapping(history.run, "environment"))
    ]
    command = shlex.join(str(word) for word in sequence(history.run, "command"))
    return join(
        (
            table(("what", "value"), rows, class_="facts")
            if rows
            else tag("p", "No environment was recorded.", class_="quiet"),
            tag("pre", tag("code", command)) if command else None,
        )
    )


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a b", leaf) for every leaf of nested objects and lists of objects."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, dict):
            yield from flat(entry, f"{name} ")
        elif isinstance(entry, list) and any(isinstance(item, dict) for item in entry):
            yield from flat({str(index): item for index, item in enumerate(entry)}, f"{name} ")
        else:
            yield name, entry


def _environment_value(key: str, value: Any) -> str:
    is_bytes = key.endswith("_bytes") and isinstance(value, int)
    return bytes_text(value) if is_bytes else value_text(value)
