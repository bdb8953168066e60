"""report.html: a run and the score of its LoRA, on one page that needs nothing else.

Input: a run folder, nothing but it. Output: `report.html` in that folder: images inside, no script,
no request (a content security policy tells the browser), the same bytes for the same folder. The template of the
same name beside this file is the page; here are the facts that it shows. A text from a caption, a name or a
message is escaped where it enters (charts.py). docs/scores.md has the formulas of the score.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import read_json_object, write_atomic
from lora_trainer.common.wording import (
    INTERRUPTED_EXIT_CODES,
    against_base,
    bytes_text,
    duration_text,
    loss_text,
)
from lora_trainer.reporting import report_details
from lora_trainer.reporting.charts import Html, render
from lora_trainer.reporting.history import Row, RunHistory, mapping, number, read_history, sequence
from lora_trainer.reporting.report_curves import loss_curve, small_curves, smoothed_losses
from lora_trainer.reporting.sample_grid import column_name, inside, sample_grid
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
    is_stopped = history.end is not None and history.end["event"] == "stopped"
    return render(
        REPORT_FILE,
        name=str(history.run.get("name") or history.started.get("name") or history.folder.name),
        verdict=verdict(history),
        fix=_reason(history.end)[1] if history.end and is_stopped else "",
        about=_about(history),
        figures=list(_key_figures(history)),
        grid=sample_grid(history),
        column_name=column_name,
        loss_curve=loss_curve(history),
        small_curves=small_curves(history),
        score=_score(history.folder),
        unreadable_lines=history.unreadable_lines,
        **report_details.details(history),
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
    values = {name: number(parts, name) for name in WEIGHTS}
    return {
        "verdict": sentence,
        "parts": [
            (
                name,
                f"{weight:.2f}",
                f"{values[name]:.2f}" if math.isfinite(values[name]) else "",
                left_out.get(name, ""),
            )
            for name, weight in WEIGHTS.items()
        ],
        "notes": sequence(row, "notes"),
    }


def verdict(history: RunHistory) -> tuple[str, str]:
    """Return (finished | stopped | failed | unfinished, one plain sentence)."""
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
        return "finished", f"Finished: {compared}{early}."
    progress = f"step {history.steps[-1].step if history.steps else 0:,} of {_planned(history)}"
    also = f"; {compared}" if compared else ""
    if end is None:
        return "unfinished", f"Not finished: the record ends at {progress}{also}."
    kind = "stopped" if end.get("exit_code") in INTERRUPTED_EXIT_CODES else "failed"
    return kind, f"{kind.capitalize()} at {progress}: {_reason(end)[0]}{also}."


def _reason(end: Row) -> tuple[str, str]:
    """Return the reason of a stopped run, and its remedy."""
    sentence, _, fix = str(end.get("reason") or "no reason was recorded").partition(" Fix: ")
    return sentence.rstrip("."), fix


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
    seconds = history.phase_seconds
    times = [f"training {duration_text(seconds['train'])}"] if "train" in seconds else []
    times += [f"in {history.sessions} sessions"] if history.sessions > 1 else []
    yield "Steps", f"{len(history.steps):,}", f"of {_planned(history)}"
    yield "Time", duration_text(sum(seconds.values())), ", ".join(times)
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
    yield "Validation loss", *_validation(history)
    yield "File", *_file(history)


def _validation(history: RunHistory) -> tuple[str, str]:
    base, last = history.base_validation, history.last_validation
    if last is None:
        return "none", "no images were held out"
    details = [f"base {loss_text(base.loss)}"] if base else []
    best = min(
        (row for row in history.validations if row.step),
        key=lambda row: (math.isnan(row.loss), row.loss),
    )
    if best.step != last.step and best.loss < last.loss:
        details.append(f"best {loss_text(best.loss)} at step {best.step:,}")
    return loss_text(last.loss), "; ".join(details)


def _file(history: RunHistory) -> tuple[str, str]:
    names = [str(mark.fields["export"]) for mark in history.marks if mark.fields.get("export")]
    if history.end and history.end["event"] == "finished" and history.end.get("export"):
        names.append(str(history.end["export"]))
    if not names:
        return "none", "nothing was exported"
    try:
        size = bytes_text(inside(history.folder, names[-1]).stat().st_size)
    except (OSError, ValueError):
        size = "no longer in the run folder"
    return names[-1], size
