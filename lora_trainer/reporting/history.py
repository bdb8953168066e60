"""A run folder read as a history, at once or as it grows.

Input: run.json, events.jsonl and problems.jsonl, also of a killed or resumed run. Output: a `RunHistory` of
events. A step that was trained again after a resume counts once, as it went last; lines that are torn or lack
their step are counted in `unreadable_lines`, never raised.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lora_trainer.common.errors import RequestError
from lora_trainer.common.event_kinds import (
    Change,
    Event,
    Finished,
    ImageLoss,
    ImageLosses,
    Preview,
    Problem,
    Resumed,
    RunStarted,
    Samples,
    Saved,
    Step,
    Stopped,
    Validation,
    event_of_row,
)
from lora_trainer.common.events import json_row
from lora_trainer.common.files import open_regular, read_json_object
from lora_trainer.common.records import figure, of_json
from lora_trainer.reporting.run_record import RUN_FILE, RunRecord

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A save, a change of a setting or a resume, with the step at which it was."""

    step: int
    event: Saved | Change | Resumed


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
    run: RunRecord
    started: RunStarted
    """How its last session began; nothing is known of one that was not recorded."""
    steps: tuple[Step, ...]
    validations: tuple[Validation, ...]
    samples: tuple[SampleImage, ...]
    previews: tuple[Preview, ...]
    marks: tuple[Mark, ...]
    problems: tuple[Problem, ...]
    seconds: float
    """Seconds of all sessions, without the pauses between them."""
    sessions: int
    images: tuple[ImageLoss, ...]
    """What was learned of each image; empty where that was not measured."""
    image_levels: int
    """At how many noise levels that was measured."""
    end: Finished | Stopped | None
    """How its last session ended."""
    unreadable_lines: int

    @property
    def base_validation(self) -> Validation | None:
        return next((row for row in self.validations if row.step == 0), None)

    @property
    def last_validation(self) -> Validation | None:
        return self.validations[-1] if self.validations and self.validations[-1].step else None

    @property
    def saves(self) -> tuple[Saved, ...]:
        return tuple(mark.event for mark in self.marks if isinstance(mark.event, Saved))


def number(row: Row, key: str) -> float:
    """Return a number of a row as float, NaN where there is none."""
    return float(figure(row.get(key)))


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

    def read(self) -> tuple[bool, list[Event]]:
        """Return whether earlier events have to be forgotten first, and the new ones.

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
        events = [event for row in rows if (event := event_of_row(row)) is not None]
        self._damaged += len(rows) - len(events)
        self.unreadable_lines = self._damaged + bool(torn.strip())
        return anew, events


RECENT_EVENTS = 200
NOT_RECORDED = cast(RunStarted, event_of_row({"event": RunStarted.kind}))


@dataclass
class _EventSum:
    """The sum of the events so far.

    A change without a step of its own gets that of the step before it.
    """

    started: RunStarted = NOT_RECORDED
    sessions: int = 0
    end: Finished | Stopped | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    validations: dict[int, Validation] = field(default_factory=dict)
    samples: list[SampleImage] = field(default_factory=list)
    previews: dict[int, Preview] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    images: tuple[ImageLoss, ...] = ()
    image_levels: int = 0
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    seconds: float = 0.0
    _last_s: float = math.nan
    _step: int = 0

    def take(self, event: Event) -> None:
        passed_s = event.time_s - self._last_s
        # The pause before a resume, which writes `resumed` first, is not time of the run.
        if passed_s > 0 and not isinstance(event, Resumed | RunStarted):
            self.seconds += passed_s
        self._last_s = event.time_s
        if not isinstance(event, Step | Preview):  # which are many, and tell nothing in words
            self.recent.append(event)
        match event:
            case Step():
                self._step = event.step
                self.steps[event.step] = event
            case RunStarted():
                self._begin(event)
            case Validation():
                self._step = event.step
                self.validations[event.step] = event
            case Samples():
                self._step = event.step
                self.samples += [
                    SampleImage(
                        step=event.step, prompt=each.prompt, seed=str(each.seed), file=each.file
                    )
                    for each in event.images
                ]
            case Preview():
                self.previews[event.step] = event
            case Saved() | Resumed():
                self._step = event.step
                self.marks.append(Mark(step=event.step, event=event))
            case Change():
                self.marks.append(Mark(step=self._step, event=event))
            case ImageLosses():
                self.images, self.image_levels = tuple(event.images), event.levels
            case Finished() | Stopped():
                self.end = event

    def _begin(self, started: RunStarted) -> None:
        """Begin a session: all steps after the one that is resumed from are forgotten."""
        self.started, self.end, self.images = started, None, ()
        self.sessions += 1
        last = -1 if started.resumed_from is None else started.resumed_from
        self.steps = {step: each for step, each in self.steps.items() if step <= last}
        self.validations = {step: each for step, each in self.validations.items() if step <= last}
        self.samples = [image for image in self.samples if image.step <= last]
        self.previews = {step: each for step, each in self.previews.items() if step <= last}
        self.marks = [mark for mark in self.marks if mark.step <= last]
        self._step = max(0, last)


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
        self._problem_list: list[Problem] = []

    def read(self) -> RunHistory:
        """Return the run as its files have it now; raises RequestError for a file that cannot be read."""
        file = self.folder / RUN_FILE
        run = of_json(RunRecord, read_json_object(file) if os.path.lexists(file) else {})
        try:
            return self._read(run)
        except OSError as error:
            name = Path(error.filename or self.folder).name
            raise RequestError(
                f"{self.folder}: {name} cannot be read: {error.strerror or error}",
                fix="put back the file that the run wrote",
            ) from error

    def _read(self, run: RunRecord) -> RunHistory:
        anew, events = self._events.read()
        so_far = self._sum = _EventSum() if anew else self._sum
        for event in events:
            so_far.take(event)
        anew, found = self._problems.read()
        problems = [event for event in found if isinstance(event, Problem)]
        self._problem_list = problems if anew else self._problem_list + problems
        return RunHistory(
            folder=self.folder,
            run=run,
            started=so_far.started,
            sessions=so_far.sessions,
            steps=tuple(so_far.steps[step] for step in sorted(so_far.steps)),
            validations=tuple(so_far.validations[step] for step in sorted(so_far.validations)),
            samples=tuple(so_far.samples),
            previews=tuple(so_far.previews[step] for step in sorted(so_far.previews)),
            marks=tuple(so_far.marks),
            problems=tuple(self._problem_list),
            seconds=so_far.seconds,
            images=so_far.images,
            image_levels=so_far.image_levels,
            end=so_far.end,
            unreadable_lines=self._events.unreadable_lines + self._problems.unreadable_lines,
        )

    def recent(self) -> list[Event]:
        """Return the newest events that are neither steps nor previews, at most 200, by the time they were written."""
        events = [*self._sum.recent, *self._problem_list[-RECENT_EVENTS:]]
        # An event without a time is taken for the oldest: NaN is never the larger one.
        return sorted(events, key=lambda event: max(0.0, event.time_s))[-RECENT_EVENTS:]


def is_recovery(mark: Mark) -> bool:
    """Whether a mark is a change with which a run went on after it ran out of memory."""
    change = mark.event
    if not isinstance(change, Change) or not change.key.startswith("memory."):
        return False
    # A larger micro-batch is the way back.
    return change.key != "memory.micro_batch" or not figure(change.new) > figure(change.old)
