"""report.html: a run and the score of its LoRA, on one page that needs nothing else.

The report's section on the score, from RUN/validation.json.

Input: a run folder; output: a table of parts, or None where nothing was measured or the file cannot be
read. docs/scores.md has the formulas.

report.html: a run on one page that needs nothing else.

Input: a run folder, nothing but it. Output: `report.html` in that folder: images inside, no script,
no request (a content security policy tells the browser), the same bytes for the same folder. Texts
from captions, names and messages are escaped where they enter (charts.py).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from pathlib import Path

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
from lora_trainer.reporting.charts import Html, join, tag
from lora_trainer.reporting.history import Row, RunHistory, mapping, number, read_history, sequence
from lora_trainer.reporting.report_curves import curves, smoothed_losses
from lora_trainer.reporting.report_style import CHARTS, STYLE
from lora_trainer.reporting.sample_grid import inside, sample_grid
from lora_trainer.reporting.score import VALIDATION_FILE, WEIGHTS


def section(folder: Path) -> Html | None:
    """Return the score and its parts."""
    try:
        row = read_json_object(folder / VALIDATION_FILE)
    except (OSError, RequestError):
        return None
    parts, left_out = mapping(row, "parts"), mapping(row, "left_out")
    body = [
        tag(
            "tr",
            tag("td", name),
            tag("td", f"{weight:.2f}"),
            tag("td", f"{value:.2f}" if math.isfinite(value := number(parts, name)) else ""),
            tag("td", str(left_out.get(name, ""))),
        )
        for name, weight in WEIGHTS.items()
    ]
    head = tag(
        "tr", *(tag("th", title) for title in ("part", "weight", "value", "left out because"))
    )
    remarks = [tag("p", str(note)) for note in sequence(row, "notes")]
    return join((tag("p", _verdict(row)), tag("table", head, *body), *remarks))


def _verdict(row: dict[str, object]) -> str:
    score, missing = number(row, "score"), number(row, "weight_left_out")
    name = str(row.get("file", "the adapter"))
    if not math.isfinite(score):
        return f"{name}: nothing could be measured"
    if row.get("complete") is True:
        return f"{name}: score {score:.2f} of 1"
    return f"{name}: {score:.2f} of 1 from its parts so far, without {missing:.0%} of their weight"


REPORT_FILE = "report.html"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(run_folder: Path) -> Path:
    """Write the report of a run, ended or not, and return its path.

    Raises RequestError when run.json is damaged, MachineError when the disk refuses the file.
    """
    path = run_folder / REPORT_FILE
    write_atomic(path, document(read_history(run_folder)).encode(), durable=False)
    return path


def document(history: RunHistory) -> Html:
    """Return the whole page."""
    name = str(history.run.get("name") or history.started.get("name") or history.folder.name)
    kind, sentence = verdict(history)
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name} \u2013 training report"),
        tag("style", STYLE, CHARTS),
    )
    body = (
        tag("h1", name),
        tag("p", sentence, class_=f"verdict {kind}"),
        _advice(history),
        tag("p", _about(history), class_="about"),
        _figures(history),
        *(join((tag("h2", title), content)) for title, content in _sections(history)),
        _footer(history),
    )
    return join(
        (
            Html("<!doctype html>\n"),
            tag("html", tag("head", *head), tag("body", tag("main", *body)), lang="en"),
            "\n",
        )
    )


def _sections(history: RunHistory) -> Iterator[tuple[str, Html]]:
    yield "Samples", sample_grid(history)
    yield "Curves", curves(history)
    if (worth := section(history.folder)) is not None:
        yield "Worth", worth
    yield "Problems", report_details.problems(history)
    yield "Dataset", report_details.dataset(history)
    yield "Settings", report_details.settings(history)
    yield "Timings", report_details.timings(history)
    yield "Environment", report_details.environment(history)


def verdict(history: RunHistory) -> tuple[str, str]:
    """Return (finished | stopped | failed | unfinished, one plain sentence)."""
    end, validation = history.end, _validation_words(history)
    if end is not None and end["event"] == "finished":
        early = f"; ended early, as {end['early']}" if end.get("early") else ""
        return "finished", f"Finished: {validation or _unvalidated(history)}{early}."
    progress = _progress(history)
    also = f"; {validation}" if validation else ""
    if end is None:
        return "unfinished", f"Not finished: the record ends at {progress}{also}."
    kind = "stopped" if end.get("exit_code") in INTERRUPTED_EXIT_CODES else "failed"
    return kind, f"{kind.capitalize()} at {progress}: {_reason(end)[0]}{also}."


def _reason(end: Row) -> tuple[str, str]:
    """Return the reason of a stopped run, and its remedy."""
    sentence, _, fix = str(end.get("reason") or "no reason was recorded").partition(" Fix: ")
    return sentence.rstrip("."), fix


def _progress(history: RunHistory) -> str:
    step = history.steps[-1].step if history.steps else 0
    return f"step {step:,} of {_planned(history)}"


def _planned(history: RunHistory) -> str:
    planned = number(history.started, "steps")
    return f"{planned:,.0f}" if math.isfinite(planned) else "an unknown number"


def _validation_words(history: RunHistory) -> str:
    base, last = history.base_validation, history.last_validation
    if base is None or last is None:
        return ""
    return f"the validation loss is {against_base(last.loss, base.loss)}"


def _unvalidated(history: RunHistory) -> str:
    if history.last_validation is None:
        return f"{len(history.steps):,} steps; nothing was validated"
    loss = loss_text(history.last_validation.loss)
    return f"the validation loss is {loss}; the base was not validated"


def _advice(history: RunHistory) -> Html | None:
    fix = _reason(history.end)[1] if history.end and history.end["event"] == "stopped" else ""
    return tag("p", f"What to do: {fix}", class_="advice") if fix else None


def _about(history: RunHistory) -> str:
    started = history.started
    base = mapping(history.run, "base")
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


def _figures(history: RunHistory) -> Html:
    return tag(
        "dl",
        *(
            tag("div", tag("dt", title), tag("dd", value), tag("dd", detail), class_=title.lower())
            for title, value, detail in _key_figures(history)
        ),
        class_="figures",
    )


def _key_figures(history: RunHistory) -> Iterator[tuple[str, str, str]]:
    total_s = sum(history.phase_seconds.values())
    sessions = f"in {history.sessions} sessions" if history.sessions > 1 else ""
    training = (
        f"training {duration_text(history.phase_seconds['train'])}"
        if "train" in history.phase_seconds
        else ""
    )
    yield "Steps", f"{len(history.steps):,}", f"of {_planned(history)}"
    yield "Time", duration_text(total_s), ", ".join(filter(None, (training, sessions)))
    yield "Images", *_images(history)
    yield "Training loss", *_loss(history)
    yield "Validation loss", *_validation(history)
    yield "File", *_file(history)


def _images(history: RunHistory) -> tuple[str, str]:
    images = number(mapping(history.run, "dataset"), "images")
    batch = number(history.started, "batch_size")
    held_out = number(history.started, "validation_images")
    details = [f"batch {batch:.0f}"] if math.isfinite(batch) else []
    details += [f"{held_out:.0f} held out"] if held_out > 0 else []
    return (f"{images:,.0f}" if math.isfinite(images) else "unknown"), ", ".join(details)


def _loss(history: RunHistory) -> tuple[str, str]:
    losses, span_steps = smoothed_losses(history.steps)
    if not losses:
        return "none", "no step was trained"
    return loss_text(losses[-1]), f"mean of about {span_steps} steps"


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
    final = (
        history.end.get("export") if history.end and history.end["event"] == "finished" else None
    )
    name = str(final) if final else (names[-1] if names else "")
    if not name:
        return "none", "nothing was exported"
    try:
        size = bytes_text(inside(history.folder, name).stat().st_size)
    except (OSError, ValueError):
        size = "no longer in the run folder"
    return name, size


def _footer(history: RunHistory) -> Html | None:
    if not history.unreadable_lines:
        return None
    count = history.unreadable_lines
    lines = "1 line" if count == 1 else f"{count} lines"
    text = f"{lines} of events.jsonl or problems.jsonl could not be read"
    return tag("footer", f"{text}; the last line of a killed run is often torn.")
