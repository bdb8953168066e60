"""report.html: a run and the score of its LoRA, on one page that needs nothing else.

Input: a run folder, nothing but it. Output: `report.html` in that folder: images inside, no script,
no request (a content security policy tells the browser), the same bytes for the same folder. The template of the
same name beside this file is the page; here are the facts that it shows. A text from a caption, a name or a
message is escaped where it enters (charts.py). docs/scores.md has the formulas of the score.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import SEVERITIES
from lora_trainer.common.files import read_json_object, write_atomic
from lora_trainer.common.wording import (
    INTERRUPTED_EXIT_CODES,
    against_base,
    bytes_text,
    duration_text,
    loss_text,
    step_seconds_text,
)
from lora_trainer.config.config import all_settings
from lora_trainer.reporting.charts import Html, loss_curve, rate_curve, render, smoothed_losses
from lora_trainer.reporting.history import (
    Row,
    RunHistory,
    SampleImage,
    mapping,
    number,
    read_history,
    sequence,
)
from lora_trainer.reporting.score import VALIDATION_FILE, WEIGHTS

REPORT_FILE = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write the report of a run, ended or not, and return its path.

    Raises RequestError when run.json is damaged, MachineError when the disk refuses the file.
    """
    path = run_folder / REPORT_FILE
    write_atomic(path, document(read_history(run_folder)).encode(), durable=False)
    return path


def document(history: RunHistory) -> Html:
    """Return the whole page."""
    run, started = history.run, history.started
    environment = [
        (name, bytes_text(value) if name.endswith("_bytes") and isinstance(value, int) else value)
        for name, value in flat(mapping(run, "environment"))
    ]
    changes = [
        {
            **{name: str(row.get(name)) for name in ("key", "old", "new", "exactness")},
            "kind": row["event"],
            "step": f"{row['step']:,}",
            "why": row.get("reason") or "; ".join(map(str, sequence(row, "differences"))),
        }
        for row in history.marks
        if row["event"] != "saved"
    ]
    differing, defaults = _settings(history)
    return render(
        REPORT_FILE,
        name=str(run.get("name") or started.get("name") or history.folder.name),
        verdict=verdict(history),
        about=_about(history),
        figures=list(_key_figures(history)),
        grid=sample_grid(history),
        column_name=column_name,
        loss_curve=loss_curve(history),
        rate_curve=rate_curve(history),
        score=_score(history.folder),
        severities=SEVERITIES,
        changes=changes,
        problems=_problems(history),
        dataset=_dataset(mapping(run, "dataset")),
        differing=differing,
        defaults=defaults,
        timings=list(_timings(history)),
        environment=[(name, value_text(value)) for name, value in environment],
        command=shlex.join(str(word) for word in sequence(run, "command")),
        unreadable_lines=history.unreadable_lines,
    )


def _score(folder: Path) -> dict[str, Any] | None:
    """Return the score and its parts from RUN/validation.json, None without a readable one."""
    try:
        row = read_json_object(folder / VALIDATION_FILE)
    except (OSError, RequestError):
        return None
    score, name = number(row, "score"), str(row.get("file", "the adapter"))
    if not math.isfinite(score):
        sentence = f"{name}: nothing could be measured"
    elif row.get("complete") is True:
        sentence = f"{name}: score {score:.2f} of 1"
    else:
        missing = f"without {number(row, 'weight_left_out'):.0%} of their weight"
        sentence = f"{name}: {score:.2f} of 1 from its parts so far, {missing}"
    parts, left_out = mapping(row, "parts"), mapping(row, "left_out")
    rows = [
        (name, weight, number(parts, name), left_out.get(name, ""))
        for name, weight in WEIGHTS.items()
    ]
    return {"verdict": sentence, "parts": rows, "notes": sequence(row, "notes")}


def verdict(history: RunHistory) -> tuple[str, str, str]:
    """Return (finished | stopped | failed | unfinished, one plain sentence, the remedy or "")."""
    end, base, last = history.end, history.base_validation, history.last_validation
    compared = ""
    if base is not None and last is not None:
        compared = f"the validation loss is {against_base(last.loss, base.loss)}"
    if end is not None and end["event"] == "finished":
        early = f"; ended early, as {end['early']}" if end.get("early") else ""
        if last is None:
            compared = f"{len(history.steps):,} steps; nothing was validated"
        elif base is None:
            compared = f"the validation loss is {loss_text(last.loss)}; the base was not validated"
        return "finished", f"Finished: {compared}{early}.", ""
    progress = f"step {history.steps[-1].step if history.steps else 0:,} of {_planned(history)}"
    also = f"; {compared}" if compared else ""
    if end is None:
        return "unfinished", f"Not finished: the record ends at {progress}{also}.", ""
    reason, _, fix = str(end.get("reason") or "no reason was recorded").partition(" Fix: ")
    kind = "stopped" if end.get("exit_code") in INTERRUPTED_EXIT_CODES else "failed"
    return kind, f"{kind.capitalize()} at {progress}: {reason.rstrip('.')}{also}.", fix


def _planned(history: RunHistory) -> str:
    planned = number(history.started, "steps")
    return f"{planned:,.0f}" if math.isfinite(planned) else "an unknown number"


def _about(history: RunHistory) -> str:
    started, base = history.started, mapping(history.run, "base")
    parts = [
        f"{started.get('family') or base.get('family') or 'unknown family'}",
        f"base {started.get('base') or base.get('source') or 'unknown'}",
        f"on {started.get('device', 'an unknown device')}",
        f"preset {started.get('tier', '?')} / {started.get('priority', '?')}",
    ]
    began_s = number(started, "time")
    if math.isfinite(began_s):
        began = datetime.datetime.fromtimestamp(began_s, tz=datetime.UTC)
        parts.append(f"started {began:%Y-%m-%d %H:%M} UTC")
    return " \u00b7 ".join(parts)


def _key_figures(history: RunHistory) -> Iterator[tuple[str, str, str]]:
    """Yield title, value and detail of each figure at the top of the page."""
    yield "Steps", f"{len(history.steps):,}", f"of {_planned(history)}"
    sessions = f"in {history.sessions} sessions" if history.sessions > 1 else ""
    yield "Time", duration_text(history.seconds), sessions
    images = number(mapping(history.run, "dataset"), "images")
    batch = number(history.started, "batch_size")
    held_out = number(history.started, "validation_images")
    details = [f"batch {batch:.0f}"] if math.isfinite(batch) else []
    details += [f"{held_out:.0f} held out"] if held_out > 0 else []
    yield "Images", f"{images:,.0f}" if math.isfinite(images) else "unknown", ", ".join(details)
    losses, span_steps = smoothed_losses(history.steps)
    if losses:
        yield "Training loss", loss_text(losses[-1]), f"mean of about {span_steps} steps"
    else:
        yield "Training loss", "none", "no step was trained"
    base, last = history.base_validation, history.last_validation
    if last is None:
        yield "Validation loss", "none", "no images were held out"
    else:
        details = [f"base {loss_text(base.loss)}"] if base else []
        best = min(
            (row for row in history.validations if row.step),
            key=lambda row: (math.isnan(row.loss), row.loss),
        )
        if best.step != last.step and best.loss < last.loss:
            details.append(f"best {loss_text(best.loss)} at step {best.step:,}")
        yield "Validation loss", loss_text(last.loss), "; ".join(details)
    ends = [history.end] if history.end and history.end["event"] == "finished" else []
    names = [str(row["export"]) for row in (*history.marks, *ends) if row.get("export")]
    if not names:
        yield "File", "none", "nothing was exported"
        return
    try:
        size = bytes_text(inside(history.folder, names[-1]).stat().st_size)
    except (OSError, ValueError):
        size = "no longer in the run folder"
    yield "File", names[-1], size


_PROBLEM = ("severity", "what", "file", "fix", "code")
_MEMORY = {
    "vram_bytes": "device memory in tensors, highest",
    "vram_reserved_bytes": "device memory reserved, highest",
    "vram_used_bytes": "whole GPU in use, highest",
    "host_bytes": "memory of the process, highest",
}


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
        "images": number(data, "images"),
        "name": data.get("name", "unknown"),
        "held_out": [str(name) for name in sequence(data, "held_out")],
        "scores": scores.items(),
        "buckets": [
            (name, count, count / most)
            for name, count in sorted(buckets.items(), key=lambda entry: -entry[1])
        ],
        "findings": sorted(findings, key=lambda row: (_severity(row), row["file"])),
    }


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


def _timings(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the figures of time and memory."""
    timed = [row for row in history.steps if math.isfinite(row.seconds)]
    if seconds := sorted(row.seconds for row in timed):
        yield "step, median", step_seconds_text(statistics.median(seconds))
        yield "step, slowest of 20", step_seconds_text(seconds[math.ceil(0.95 * len(seconds)) - 1])
        waited = [row for row in timed if math.isfinite(row.data_wait_s)]
        total_s = math.fsum(row.seconds for row in waited)
        wait_s = math.fsum(row.data_wait_s for row in waited)
        yield "share of waiting for data", f"{100 * wait_s / total_s if total_s else 0.0:.1f} %"
        batch = number(history.started, "batch_size")
        if math.isfinite(batch):
            yield "images per second of steps", f"{batch * len(seconds) / sum(seconds):.1f}"
        saves_s = [number(row, "seconds") for row in history.marks if row["event"] == "saved"]
        if saves_s:
            yield f"saves, {len(saves_s)} together", duration_text(math.fsum(saves_s))
    peaks = dict.fromkeys(_MEMORY, 0.0)
    for name, text in _MEMORY.items():
        for row in history.steps:
            peaks[name] = max(peaks[name], getattr(row, name))  # NaN is never the larger one
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


# ---- the grid of samples

MAX_COLUMNS = 12
EMBEDDED_MAX_PX = 384
SMALL_PX = 128


def sample_grid(history: RunHistory) -> dict[str, Any] | None:
    """Return the grid's `steps`, `rows` of (prompt, seed, cells) and `left_out`; None when the run made no samples.

    A cell is an image as a data URI; without one, `words` say why, `fault` more exactly.
    """
    images = {(image.prompt, image.seed, image.step): image for image in history.samples}
    if not images:
        return None
    all_steps = sorted({step for *_, step in images})
    # Evenly spaced by position, the first and the last step among them.
    last = min(len(all_steps), MAX_COLUMNS) - 1
    steps = [
        all_steps[round(index * (len(all_steps) - 1) / max(1, last))] for index in range(last + 1)
    ]
    rows = [
        (prompt, seed, [_cell(images.get((prompt, seed, step)), history.folder) for step in steps])
        for prompt, seed in dict.fromkeys((prompt, seed) for prompt, seed, _ in images)
    ]
    return {"steps": steps, "rows": rows, "left_out": len(all_steps) - len(steps)}


def column_name(step: int) -> str:
    """Return a step in words; step 0 is the untouched base."""
    return f"step {step:,}" if step else "base"


def _cell(image: SampleImage | None, folder: Path) -> dict[str, str]:
    if image is None:
        return {"words": "not sampled", "uri": "", "fault": ""}
    try:
        data = inside(folder, image.file).read_bytes()
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            kind = "png"
            if picture.format != "PNG" or max(picture.size) > SMALL_PX:  # large images are reduced
                reduced, buffer, kind = picture.convert("RGB"), io.BytesIO(), "jpeg"
                reduced.thumbnail((EMBEDDED_MAX_PX, EMBEDDED_MAX_PX), Image.Resampling.LANCZOS)
                reduced.save(buffer, format="JPEG", quality=88, subsampling=0)
                data = buffer.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for some damaged PNG chunks.
        fault = f"{image.file}: {type(error).__name__}"
        return {"words": "unreadable", "uri": "", "fault": fault}
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return {"words": f"{column_name(image.step)}: {image.prompt}", "uri": uri, "fault": ""}


def inside(folder: Path, file: str) -> Path:
    """Return the path of `file` in `folder`; raises ValueError when it leads out of it."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{file} is outside of the run folder")
    return path
