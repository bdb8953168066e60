"""A run folder read as a history, at once or as it grows.

Input: run.json, events.jsonl and problems.jsonl, also of a killed or resumed run. Output: a `RunHistory` of typed
rows. A figure that is missing or of another type is NaN, never an error. A step that was trained again after a
resume counts once, as it went last; lines that are torn or lack their step are counted in
`unreadable_lines`, never raised.

A reader that is kept reads only new lines, each once its end is written. One process appends to a file and a resume
replaces it: the bytes just before the place reached are compared, so that a file which was cut and has grown past
that place again is not taken for the one that was read.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import is_step, json_row
from lora_trainer.common.files import open_regular, read_json_object

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step; a figure that was not recorded is NaN."""

    step: int
    loss: float
    lr: float
    seconds: float
    data_wait_s: float
    vram_bytes: float
    vram_reserved_bytes: float
    vram_used_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """One validation; step 0 is the untouched base."""

    step: int
    loss: float
    by_timestep: tuple[tuple[float, float], ...]


STEP_FIGURES = tuple(entry.name for entry in fields(StepRow) if entry.name != "step")


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """One sample image."""

    step: int
    prompt: str
    seed: str
    file: str
    """Relative to the run folder, as the run wrote it."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as its folder tells it; steps ascend."""

    folder: Path
    run: Row
    started: Row
    steps: tuple[StepRow, ...]
    validations: tuple[ValidationRow, ...]
    samples: tuple[SampleImage, ...]
    marks: tuple[Row, ...]
    """Saves, changes of a setting and resumes, each with its step."""
    problems: tuple[Row, ...]
    seconds: float
    """Seconds of all sessions, without the pauses between them."""
    sessions: int
    end: Row | None
    """How its last session ended."""
    unreadable_lines: int

    @property
    def base_validation(self) -> ValidationRow | None:
        return next((row for row in self.validations if row.step == 0), None)

    @property
    def last_validation(self) -> ValidationRow | None:
        return self.validations[-1] if self.validations and self.validations[-1].step else None


# Above every figure of a run.
_MOST = 1e100


def number(row: Row, key: str) -> float:
    """Return a number of a row as float, NaN where there is none."""
    return _figure(row.get(key))


def _figure(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    # Also false for NaN. A sum of larger ones would be infinite, and infinite ones have none.
    return float(value) if abs(value) < _MOST else math.nan


def mapping(row: Row, key: str) -> Row:
    """Return an object of a row, an empty one where there is none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def sequence(row: Row, key: str) -> Sequence[Any]:
    """Return a list of a row, an empty one where there is none."""
    value = row.get(key)
    return value if isinstance(value, list) else ()


_COMPARED_BYTES = 4096


@dataclass
class JsonlFollower:
    """The place reached in a file that is read by whole lines; a missing file counts as empty."""

    path: Path
    read_once: bool = False
    """Whether the file is read only once, so its last row may be complete without a line break."""
    _inode: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)
    _before: bytes = field(default=b"", init=False)
    unreadable_lines: int = field(default=0, init=False)
    _damaged: int = field(default=0, init=False)

    def read(self) -> tuple[bool, list[Row]]:
        """Return whether earlier rows have to be forgotten first, and the new ones that can be used.

        Raises OSError for a file that is there and cannot be read.
        """
        inode, data, anew = 0, b"", True
        with suppress(FileNotFoundError), open_regular(self.path) as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset - len(self._before))
            data = file.read()
            anew = inode != self._inode or not data.startswith(self._before)
            if anew:
                file.seek(0)
                data = file.read()
        if anew:
            self._offset, self._before, self._damaged = 0, b"", 0
        self._inode = inode
        *lines, torn = data[len(self._before) :].split(b"\n")
        if self.read_once and json_row(torn) is not None:
            lines, torn = [*lines, torn], b""
        self._offset += sum(len(line) + 1 for line in lines)
        self._before = data[: len(data) - len(torn)][-_COMPARED_BYTES:]
        rows = [json_row(line) or {} for line in lines if line.strip()]
        usable: list[Row] = [
            row
            for row in rows
            if isinstance(kind := row.get("event"), str)
            and (kind not in _STEPPED or is_step(row.get("step")))
        ]
        self._damaged += len(rows) - len(usable)
        self.unreadable_lines = self._damaged + bool(torn.strip())
        return anew, usable


RECENT_ROWS = 200
_STEPPED = frozenset({"step", "validation", "sample", "saved", "resumed"})
_ENDS = frozenset({"run_started", "finished", "stopped"})
_MARKS = frozenset({"saved", "change", "resumed"})


@dataclass
class _EventSum:
    """The sum of the events so far.

    Rows without a step of their own get that of the step before them.
    """

    started: Row = field(default_factory=dict)
    sessions: int = 0
    end: Row | None = None
    steps: dict[int, StepRow] = field(default_factory=dict)
    validations: dict[int, ValidationRow] = field(default_factory=dict)
    samples: list[SampleImage] = field(default_factory=list)
    marks: list[Row] = field(default_factory=list)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    seconds: float = 0.0
    _last_s: float = math.nan
    _step: int = 0

    def take(self, row: Row) -> None:
        kind, now_s = row["event"], number(row, "time")
        passed_s = now_s - self._last_s
        # The pause before a resume, which writes `resumed` first, is not time of the run.
        if passed_s > 0 and kind not in ("resumed", "run_started"):
            self.seconds += passed_s
        self._last_s = now_s
        if kind in _ENDS:
            self.end = None if kind == "run_started" else row
        if kind == "run_started":
            self.started = row
            self.sessions += 1
            # All steps after the one that is resumed from are forgotten.
            resumed_from = row.get("resumed_from")
            last = resumed_from if is_step(resumed_from) else -1
            self.steps = {step: each for step, each in self.steps.items() if step <= last}
            self.validations = {n: each for n, each in self.validations.items() if n <= last}
            self.samples = [image for image in self.samples if image.step <= last]
            self.marks = [mark for mark in self.marks if mark["step"] <= last]
            self._step = max(0, last)
        elif kind in _STEPPED:
            self._step = row["step"]
        if kind == "step":
            figures = {name: number(row, name) for name in STEP_FIGURES}
            self.steps[self._step] = StepRow(step=self._step, **figures)
            return
        self.recent.append(row)
        if kind == "validation":
            by_timestep = tuple(
                (_figure(pair[0]), _figure(pair[1]))
                for pair in sequence(row, "by_timestep")
                if isinstance(pair, list) and len(pair) == 2
            )
            self.validations[self._step] = ValidationRow(
                step=self._step, loss=number(row, "loss"), by_timestep=by_timestep
            )
        elif kind == "sample":
            images = (image for image in sequence(row, "images") if isinstance(image, dict))
            for image in images:
                texts = {key: str(image.get(key, "")) for key in ("prompt", "seed", "file")}
                self.samples.append(SampleImage(step=self._step, **texts))
        elif kind in _MARKS:
            self.marks.append({**row, "step": self._step})


def read_history(folder: Path) -> RunHistory:
    """Read a run folder; a missing run.json counts as empty, a damaged one raises RequestError."""
    return HistoryReader(folder, read_once=True).read()


class HistoryReader:
    """A run folder as last read; a `read` costs the new lines and one pass over the steps."""

    def __init__(self, folder: Path, *, read_once: bool = False) -> None:
        self.folder = folder
        self._events = JsonlFollower(folder / "events.jsonl", read_once)
        self._problems = JsonlFollower(folder / "problems.jsonl", read_once)
        self._sum = _EventSum()
        self._problem_rows: list[Row] = []

    def read(self) -> RunHistory:
        """Return the run as its files have it now; raises RequestError for a file that cannot be read."""
        file = self.folder / "run.json"
        run = read_json_object(file) if os.path.lexists(file) else {}
        try:
            return self._read(run)
        except OSError as error:
            name = Path(error.filename or self.folder).name
            raise RequestError(
                f"{self.folder}: {name} cannot be read: {error.strerror or error}",
                fix="put back the file that the run wrote",
            ) from error

    def _read(self, run: Row) -> RunHistory:
        anew, events = self._events.read()
        so_far = self._sum = _EventSum() if anew else self._sum
        for row in events:
            so_far.take(row)
        anew, problems = self._problems.read()
        self._problem_rows = problems if anew else self._problem_rows + problems
        return RunHistory(
            folder=self.folder,
            run=run,
            started=so_far.started,
            sessions=so_far.sessions,
            steps=tuple(so_far.steps[step] for step in sorted(so_far.steps)),
            validations=tuple(so_far.validations[step] for step in sorted(so_far.validations)),
            samples=tuple(so_far.samples),
            marks=tuple(so_far.marks),
            problems=tuple(self._problem_rows),
            seconds=so_far.seconds,
            end=so_far.end,
            unreadable_lines=self._events.unreadable_lines + self._problems.unreadable_lines,
        )

    def recent(self) -> list[Row]:
        """Return the newest rows that are not steps, at most 200, by the time they were written."""
        rows = [*self._sum.recent, *self._problem_rows[-RECENT_ROWS:]]
        # A row without a time is taken for the oldest: NaN is never the larger one.
        return sorted(rows, key=lambda row: max(0.0, number(row, "time")))[-RECENT_ROWS:]
