"""Reads a run folder, at once or as it grows: the rows of its files put together as a `History`.

Input: a run folder, also one of a killed or resumed run. A step that was trained again after a
resume counts once, as it went last; lines that are torn or lack their step are counted in
`unreadable_lines`, never raised. A reader that is kept parses only what is new.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lora_trainer.files import read_json_object
from lora_trainer.output.history import (
    History,
    MarkRow,
    Row,
    SampleImage,
    StepRow,
    ValidationRow,
    number,
    sample_images,
    step_row,
    validation_row,
)
from lora_trainer.output.jsonl_follower import JsonlFollower, News

RECENT_ROWS = 200
_STEPPED = frozenset({"step", "validation", "sample", "saved", "resumed"})
_ENDS = frozenset({"run_started", "finished", "stopped"})
_MARKS = frozenset({"saved", "change", "resumed"})


class _Placed(Protocol):
    @property
    def step(self) -> int: ...


Placed = TypeVar("Placed", bound=_Placed)


def read_history(folder: Path) -> History:
    """Read a run folder; a missing run.json counts as empty, a damaged one raises RequestError."""
    return HistoryReader(folder).read()


@dataclass
class HistoryReader:
    """What is known of a run folder; a `read` costs what is new and one pass over the steps."""

    folder: Path
    _events: JsonlFollower = field(init=False)
    _problems: JsonlFollower = field(init=False)
    _told: _Told = field(default_factory=lambda: _Told(), init=False)
    _listed: _Listed = field(default_factory=lambda: _Listed(), init=False)
    _run: Row = field(default_factory=dict, init=False)
    _run_stamp: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._events = JsonlFollower(self.folder / "events.jsonl")
        self._problems = JsonlFollower(self.folder / "problems.jsonl")

    def read(self) -> History:
        """Return the run as its files have it now; raises RequestError for run.json, OSError."""
        run = self._read_run()
        events, problems = self._events.read(), self._problems.read()
        if events.anew:
            self._told = _Told()
        if problems.anew:
            self._listed = _Listed()
        for row in self._told.usable(events):
            self._told.take(row)
        self._listed.rows.extend(self._listed.usable(problems))
        torn = events.torn + problems.torn
        return self._told.history(self.folder, run=run, listed=self._listed, torn=torn)

    def recent(self) -> list[Row]:
        """Return the newest rows that are no steps, at most 200, by the time they were written."""
        rows = [*self._told.recent, *self._listed.rows[-RECENT_ROWS:]]
        return sorted(rows, key=_time_s)[-RECENT_ROWS:]

    def _read_run(self) -> Row:
        file = self.folder / "run.json"
        try:
            stat = file.stat()
        except FileNotFoundError:
            self._run_stamp, self._run = (), {}
            return {}
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp != self._run_stamp:
            self._run, self._run_stamp = read_json_object(file), stamp
        return self._run


def _time_s(row: Row) -> float:
    time_s = number(row, "time")
    return time_s if math.isfinite(time_s) else 0.0


@dataclass
class _Listed:
    """The rows of one file that can be used, and how many lines cannot."""

    rows: list[Row] = field(default_factory=list)
    damaged: int = 0

    def usable(self, news: News) -> Iterator[dict[str, Any]]:
        for row in news.rows:
            if row is not None and _is_usable(row):
                yield row
            else:
                self.damaged += 1


def _is_usable(row: Row) -> bool:
    kind = row.get("event")
    return isinstance(kind, str) and (kind not in _STEPPED or isinstance(row.get("step"), int))


@dataclass
class _Told(_Listed):
    """What the events so far come to; `rows` are the problems among them.

    Rows without a step of their own get that of the step before them.
    """

    started: Row = field(default_factory=dict)
    sessions: int = 0
    end: Row | None = None
    steps: dict[int, StepRow] = field(default_factory=dict)
    validations: dict[int, ValidationRow] = field(default_factory=dict)
    samples: list[SampleImage] = field(default_factory=list)
    marks: list[MarkRow] = field(default_factory=list)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    phases: _Phases = field(default_factory=lambda: _Phases())
    _step: int = 0

    def take(self, row: dict[str, Any]) -> None:
        kind = row["event"]
        self.phases.take(row)
        if kind in _ENDS:
            self.end = None if kind == "run_started" else row
        if kind == "run_started":
            self._begin(row)
        elif kind in _STEPPED:
            self._step = row["step"]
        if kind == "step":
            self.steps[self._step] = step_row(row)
            return
        self.recent.append(row)
        if kind == "validation":
            self.validations[self._step] = validation_row(row)
        elif kind == "sample":
            self.samples.extend(sample_images(row))
        elif kind == "problem":
            self.rows.append(row)
        elif kind in _MARKS:
            fields = {**row, "step": self._step}
            self.marks.append(MarkRow(kind=kind, step=self._step, fields=fields))

    def _begin(self, row: Row) -> None:
        """Count a start; it forgets all steps after the one it resumed from."""
        self.started = row
        self.sessions += 1
        resumed_from = row.get("resumed_from")
        last = resumed_from if isinstance(resumed_from, int) else -1
        self.steps = {step: kept for step, kept in self.steps.items() if step <= last}
        self.validations = {step: kept for step, kept in self.validations.items() if step <= last}
        self.samples = _until(self.samples, last)
        self.marks = _until(self.marks, last)
        self._step = max(0, last)

    def history(self, folder: Path, *, run: Row, listed: _Listed, torn: int) -> History:
        return History(
            folder=folder,
            run=run,
            started=self.started,
            sessions=self.sessions,
            steps=_in_order(self.steps),
            validations=_in_order(self.validations),
            samples=tuple(self.samples),
            marks=tuple(self.marks),
            problems=tuple(listed.rows if len(listed.rows) >= len(self.rows) else self.rows),
            phase_seconds=self.phases.seconds(),
            end=self.end,
            unreadable_lines=self.damaged + listed.damaged + torn,
        )


def _until(rows: list[Placed], last: int) -> list[Placed]:
    return [row for row in rows if row.step <= last]


def _in_order(by_step: Mapping[int, Placed]) -> tuple[Placed, ...]:
    return tuple(by_step[step] for step in sorted(by_step))


@dataclass
class _Phases:
    """The time spent in each phase; the pause between a stop and a resume is no time."""

    _spent: dict[str, float] = field(default_factory=dict)
    _phase: str = ""
    _since_s: float = math.nan

    def take(self, row: Row) -> None:
        now_s = number(row, "time")
        if row["event"] == "run_started":
            self._phase = "plan"
        elif math.isfinite(now_s - self._since_s):
            passed_s = max(0.0, now_s - self._since_s)
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + passed_s
        self._since_s = now_s
        if row["event"] == "phase":
            self._phase = str(row.get("phase", self._phase))
        elif row["event"] == "step":
            self._phase = "train"

    def seconds(self) -> dict[str, float]:
        return {name: seconds for name, seconds in self._spent.items() if seconds > 0}
