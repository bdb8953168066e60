"""The facts in the report's tables: problems, dataset, settings with their origin, timings, environment.

Input: a RunHistory. Output: rows for report.html. Everything is shown as run.json and the events have it.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.common.wording import bytes_text, duration_text, step_seconds_text
from lora_trainer.config.config import all_settings
from lora_trainer.reporting.console import PHASES
from lora_trainer.reporting.history import Row, RunHistory, mapping, number, sequence

SEVERITIES = ("error", "warning", "note")
_PROBLEM = ("severity", "what", "file", "fix", "code")
_CHANGE = ("key", "old", "new", "exactness")
_MEMORY = {
    "vram_bytes": "device memory in tensors, highest",
    "vram_reserved_bytes": "device memory reserved, highest",
    "vram_used_bytes": "whole GPU in use, highest",
    "host_bytes": "memory of the process, highest",
}


def details(history: RunHistory) -> dict[str, Any]:
    """Return the values of the template's tables, by their names there."""
    environment = flat(mapping(history.run, "environment"))
    differing, defaults = _settings(history)
    return {
        "severities": SEVERITIES,
        "changes": [_change(mark.fields) for mark in history.marks if mark.kind != "saved"],
        "problems": _problems(history),
        "dataset": _dataset(mapping(history.run, "dataset")),
        "differing": differing,
        "defaults": defaults,
        "timings": [*_step_timings(history), *_memory(history)],
        "phases": _phases(history.phase_seconds),
        "environment": [(key, _environment_value(key, value)) for key, value in environment],
        "command": shlex.join(str(word) for word in sequence(history.run, "command")),
    }


def _change(row: Row) -> dict[str, Any]:
    why = row.get("reason") or "; ".join(map(str, sequence(row, "differences")))
    values = {name: str(row.get(name)) for name in _CHANGE}
    return {"kind": row["event"], "step": f"{row['step']:,}", "why": why, **values}


def _problems(history: RunHistory) -> list[dict[str, str]]:
    """Return all that was skipped, clamped or retried; equal entries are one row with a count."""
    counts = Counter(tuple(str(row.get(key) or "") for key in _PROBLEM) for row in history.problems)
    rows = [dict(zip(_PROBLEM, values, strict=True)) for values in counts]
    for row, count in zip(rows, counts.values(), strict=True):
        row["what"] += f" (\u00d7{count})" if count > 1 else ""
    return sorted(rows, key=_severity)


def _severity(row: Mapping[str, str]) -> int:
    severity = row["severity"]
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def _dataset(data: Row) -> dict[str, Any]:
    """Return the images' score with its parts, the buckets and the findings; {} without a record."""
    if not data:
        return {}
    parts = mapping(data, "parts")
    scores = {"overall": number(data, "score")}
    scores |= {name.replace("_", " "): number(parts, name) for name in parts}
    buckets = {name: number(mapping(data, "buckets"), name) for name in mapping(data, "buckets")}
    most = max(filter(math.isfinite, buckets.values()), default=1.0)
    findings = [
        {key: str(row.get(key) or "") for key in ("severity", "file", "what", "advice")}
        for row in sequence(data, "findings")
        if isinstance(row, dict)
    ]
    return {
        "images": _count(number(data, "images")),
        "name": data.get("name", "unknown"),
        "held_out": [str(name) for name in sequence(data, "held_out")],
        "scores": [
            {
                "part": name,
                "score": f"{score:.2f}" if math.isfinite(score) else "not measured",
                "share": _share(score),
            }
            for name, score in scores.items()
        ],
        "buckets": [
            {
                "size": name.replace("x", " \u00d7 "),
                "images": _count(count),
                "share": _share(count / most),
            }
            for name, count in sorted(buckets.items(), key=lambda entry: -entry[1])
        ],
        "findings": sorted(findings, key=lambda row: (_severity(row), row["file"])),
    }


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "an unknown number of"


def _share(value: float) -> float:
    """Return a number as the length of a bar, 0 to 1."""
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def _settings(history: RunHistory) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return value, origin and reason of every setting: those that differ, those at their default."""
    values, origins = mapping(history.run, "settings"), mapping(history.run, "origins")
    infos = {info.key: info for info in all_settings()}
    differing: list[dict[str, str]] = []
    defaults: list[dict[str, str]] = []
    for key, value in values.items():
        info, origin, text = infos.get(key), mapping(origins, key), value_text(value)
        if info and info.unit and isinstance(value, int | float) and not isinstance(value, bool):
            text = f"{text} {info.unit}"
        layer, reason = origin.get("layer", ""), origin.get("reason") or ""
        row = {"key": key, "value": text, "layer": str(layer), "reason": str(reason)}
        is_default = info is not None and value == json.loads(json.dumps(info.default))
        (defaults if is_default else differing).append(row)
    return differing, defaults


def value_text(value: Any) -> str:
    """Return a JSON value in words: `on`, `off`, `none`, lists with commas."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(value_text(entry) for entry in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def _phases(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total_s = sum(seconds.values())
    return [
        {"phase": PHASES.get(name, name), "time": duration_text(spent), "share": spent / total_s}
        for name, spent in sorted(seconds.items(), key=lambda entry: -entry[1])
    ]


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
    saves_s = [number(mark.fields, "seconds") for mark in history.marks if mark.kind == "saved"]
    if saves_s:
        yield f"saves, {len(saves_s)} together", duration_text(math.fsum(saves_s))


def data_wait_fraction(history: RunHistory) -> float:
    """Return which share of the steps' time the device waited for data."""
    pairs = [(row.seconds, row.data_wait_s) for row in history.steps]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    total_s = math.fsum(seconds for seconds, _ in pairs)
    return math.fsum(wait_s for _, wait_s in pairs) / total_s if total_s else 0.0


def _memory(history: RunHistory) -> Iterator[tuple[str, str]]:
    peaks = {
        name: max(
            (figure for row in history.steps if (figure := getattr(row, name)) > 0), default=0
        )
        for name in _MEMORY
    }
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
