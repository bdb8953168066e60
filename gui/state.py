"""What the page shows of a run, as a function of its folder; no widget, no memory of its own.

Inputs: the runs folder, the name of a run, its files. Outputs: frozen values with text that is
escaped where it is markup. A name leads to a folder only if the listing of the runs has it, so that
no name can leave the runs folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from lora_trainer.errors import RequestError
from lora_trainer.output.history import History
from lora_trainer.output.history_reader import read_history
from lora_trainer.output.markup import Html, join, tag
from lora_trainer.output.sample_grid import sample_grid
from lora_trainer.output.status import Control, Request, RunStatus, read_status
from lora_trainer.output.wording import against_base, bytes_text, clock_text, loss_text

RECORDS = ("events.jsonl", "status.json", "run.json")
SERIES_TRAIN, SERIES_VALIDATION = "training loss", "validation loss"
MAX_POINTS = 400
MAX_PROBLEMS = 100
_PACE_STEPS = 50

Point = tuple[int, float, str]
Stamp = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One line of the list of runs."""

    name: str
    status: RunStatus

    @property
    def label(self) -> str:
        status = self.status
        steps = f", {status.step:,}/{status.steps:,}" if status.steps else ""
        return f"{self.name}: {status.state}{steps}"


def runs(root: Path) -> tuple[RunEntry, ...]:
    """Return the runs of a folder, those that train first, then by their last change."""
    found = sorted(_run_folders(root), key=_changed_ns, reverse=True)
    entries = [RunEntry(name=path.name, status=read_status(path)) for path in found]
    return tuple(sorted(entries, key=lambda entry: entry.status.state != "running"))


def run_folder(root: Path, name: str | None) -> Path:
    """Return the folder of a listed run; raises RequestError for any other name."""
    for path in _run_folders(root):
        if path.name == name:
            return path
    raise RequestError(f"there is no run {name!r}", fix="choose one from the list of runs")


def _run_folders(root: Path) -> Iterator[Path]:
    """Yield the folders that hold a run's records; a link may lead anywhere and is none."""
    try:
        children = sorted(root.iterdir())
    except OSError:  # no folder yet, no runs
        return
    for path in children:
        if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
            continue
        if any((path / record).is_file() for record in RECORDS):
            yield path


def _changed_ns(path: Path) -> int:
    """A heartbeat changes status.json too; the events tell when something happened."""
    return max((_stat(path / name)[0] for name in ("events.jsonl", "run.json")), default=0)


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def stamp(folder: Path, status: RunStatus) -> Stamp:
    """Return a value that changes when the view of this run does."""
    files = [_stat(folder / name) for name in ("events.jsonl", "problems.jsonl", "run.json")]
    waiting = sorted(Control(folder).pending())
    seen = (status.state, status.stage, status.step, status.steps, status.message)
    return (folder.name, *seen, *files, *waiting)


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run as the page shows it; `points` are (step, loss, series)."""

    head: Html
    points: Sequence[Point]
    samples: Html
    problems: Html
    files: Html
    requests: tuple[Request, ...]
    can_resume: bool


def view(folder: Path, status: RunStatus) -> RunView:
    """Read a run folder; one that cannot be read shows the reason instead of curves."""
    try:
        history = read_history(folder)
    except (RequestError, OSError) as error:
        return _unreadable(folder, status, str(error))
    return RunView(
        head=_head(
            folder.name, status, sentence(status, history), waiting=Control(folder).pending()
        ),
        points=loss_points(history),
        samples=tag("div", sample_grid(history), class_="run"),
        problems=problem_list(history),
        files=_files(folder, history),
        requests=get_args(Request) if status.state == "running" else (),
        can_resume=_can_resume(status),
    )


def _unreadable(folder: Path, status: RunStatus, reason: str) -> RunView:
    return RunView(
        head=_head(folder.name, status, reason, waiting=()),
        points=(),
        samples=Html(""),
        problems=Html(""),
        files=Html(""),
        requests=(),
        can_resume=False,
    )


def _can_resume(status: RunStatus) -> bool:
    return status.state in ("interrupted", "stopped", "failed")


def sentence(status: RunStatus, history: History) -> str:
    """Say in one sentence what the run does or how it ended."""
    where = f"step {status.step:,} of {status.steps:,}" if status.steps else "the start"
    if status.state == "running":
        if status.stage != "training":
            return f"Preparing: {status.message or 'starting'}"
        left = remaining_s(status, history)
        return (
            f"{status.message}{f', about {clock_text(left)} left' if math.isfinite(left) else ''}"
        )
    if status.state == "finished":
        return f"Finished after {status.step:,} steps{_result(history)}."
    if status.state == "stopped":
        return f"Stopped at {where}, its state saved; Resume goes on from there."
    if status.state == "failed":
        return f"Failed at {where} (exit code {status.exit_code}): {status.message}"
    return (
        f"Interrupted at {where}; Resume goes on from the last saved state. {_why(status)}".strip()
    )


def _why(status: RunStatus) -> str:
    return status.message if "cannot be read" in status.message else ""


def _result(history: History) -> str:
    base, last = history.base_validation, history.last_validation
    if base is None or last is None:
        return ""
    return f"; validation loss {loss_text(last.loss)}, {against_base(last.loss, base.loss)}"


def remaining_s(status: RunStatus, history: History) -> float:
    """Return the seconds left by the median of the last steps; NaN before the first step."""
    recent = [row.seconds for row in history.steps[-_PACE_STEPS:] if math.isfinite(row.seconds)]
    return (status.steps - status.step) * statistics.median(recent) if recent else math.nan


def loss_points(history: History, *, limit: int = MAX_POINTS) -> list[Point]:
    """Return the loss over steps, at most about `limit` points each the mean of its share of steps.

    Losses that are no number are left out. Validations come unthinned; step 0 is the base.
    """
    measured = [(row.step, row.loss) for row in history.steps if math.isfinite(row.loss)]
    share = max(1, math.ceil(len(measured) / limit))
    parts = [measured[start : start + share] for start in range(0, len(measured), share)]
    points = [
        (part[-1][0], statistics.fmean(loss for _, loss in part), SERIES_TRAIN) for part in parts
    ]
    validations = [
        (row.step, row.loss, SERIES_VALIDATION)
        for row in history.validations
        if math.isfinite(row.loss)
    ]
    return points + validations


def plot_payload(points: Sequence[Point]) -> dict[str, Any] | None:
    """Return what the line plot takes, without pandas; None for no points."""
    if not points:
        return None
    return {
        "columns": ["step", "loss", "series"],
        "data": [list(point) for point in points],
        "datatypes": {"step": "quantitative", "loss": "quantitative", "series": "nominal"},
        "mark": "line",
    }


def problem_list(history: History) -> Html:
    """Return the problems of a run, the last ones first, each with what to do about it."""
    if not history.problems:
        return tag("p", "No problems.", class_="quiet")
    newest = list(history.problems)[: -MAX_PROBLEMS - 1 : -1]
    items = (
        tag(
            "li",
            tag("b", f"{row.get('file')}: " if row.get("file") else None),
            f"{row.get('what', '')}. ",
            tag("span", str(row.get("fix", "")), class_="quiet"),
            class_=_severity(row.get("severity")),
        )
        for row in newest
    )
    left_out = len(history.problems) - len(newest)
    note = tag("p", f"{left_out} earlier ones are in problems.jsonl.") if left_out else None
    return join([tag("ul", *items, class_="problems"), note])


def _severity(value: object) -> str:
    return str(value) if value in ("note", "warning", "error") else "note"


def _head(name: str, status: RunStatus, said: str, *, waiting: Iterable[str]) -> Html:
    asked = [request.replace("_", " ") for request in sorted(waiting)]
    fraction = min(1.0, status.step / status.steps) if status.steps else 0.0
    bar = tag("div", tag("i", style=f"width:{fraction:.1%}"), class_=f"progress {status.state}")
    return tag(
        "div",
        tag("h2", name),
        tag("p", said, class_=f"said {status.state}"),
        tag("p", f"Asked to {' and '.join(asked)}; waiting for the trainer.") if asked else None,
        bar,
        class_="head",
    )


def _files(folder: Path, history: History) -> Html:
    """Return download links to the report and the newest exported file, where they exist."""
    exports = [mark.fields.get("export") for mark in history.marks if mark.kind == "saved"]
    exports.append(history.end.get("export") if history.end is not None else None)
    written = [name for name in exports if isinstance(name, str)]
    names = ["report.html", *written[-1:]]
    # A name with a separator would lead out of the folder.
    present = [folder / name for name in names if Path(name).name == name]
    links = [_link(path) for path in present if path.is_file() and not path.is_symlink()]
    where = tag("code", str(folder.resolve()))
    return tag("p", where, *(join([" \u00b7 ", link]) for link in links), class_="quiet")


def _link(path: Path) -> Html:
    size = bytes_text(path.stat().st_size)
    href = f"/media/run/{quote(path.parent.name, safe='')}/{quote(path.name, safe='')}"
    return tag("a", f"{path.name} ({size})", href=href, download=path.name)
