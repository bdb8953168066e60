"""What a run folder tells about its run: typed rows of run.json, events.jsonl and problems.jsonl.

Input: a run folder, also one of a killed or resumed run. Output: `History`. A step that was trained
again after a resume counts once, as it went last; lines that are torn or lack their step are
counted in `unreadable_lines`, never raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lora_trainer.events import read_jsonl
from lora_trainer.files import read_json_object

Row = Mapping[str, Any]
_STEPPED = frozenset({"step", "validation", "sample", "saved", "resumed"})


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step; a figure that was not recorded is NaN."""

    step: int
    images: float
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
    images: float
    by_timestep: tuple[tuple[float, float], ...]


STEP_FIGURES = tuple(entry.name for entry in fields(StepRow) if entry.name != "step")
Stepped = TypeVar("Stepped", StepRow, ValidationRow)


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """One sample; `file` is relative to the run folder, as the run wrote it."""

    step: int
    prompt: str
    seed: str
    file: str


@dataclass(frozen=True, kw_only=True)
class MarkRow:
    """Something that happened at `step`: a save, a change of a setting, a resume."""

    kind: str
    step: int
    fields: Row


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as its folder tells it, steps ascending; `end` is how its last session ended."""

    folder: Path
    run: Row
    started: Row
    steps: tuple[StepRow, ...]
    validations: tuple[ValidationRow, ...]
    samples: tuple[SampleImage, ...]
    marks: tuple[MarkRow, ...]
    problems: tuple[Row, ...]
    phase_seconds: Mapping[str, float]
    sessions: int
    end: Row | None
    unreadable_lines: int

    @property
    def base_validation(self) -> ValidationRow | None:
        return next((row for row in self.validations if row.step == 0), None)

    @property
    def last_validation(self) -> ValidationRow | None:
        return self.validations[-1] if self.validations and self.validations[-1].step else None


def read_history(folder: Path) -> History:
    """Read a run folder; a missing run.json counts as empty, a damaged one raises RequestError."""
    run_file = folder / "run.json"
    rows, damaged = _lines(folder / "events.jsonl")
    problems, damaged_problems = _lines(folder / "problems.jsonl")
    noted = _of(rows, "problem")
    timeline = _timeline(rows)
    starts = _of(rows, "run_started")
    ends = [row for row in rows if row.get("event") in ("run_started", "finished", "stopped")]
    return History(
        folder=folder,
        run=read_json_object(run_file) if run_file.exists() else {},
        started=starts[-1] if starts else {},
        sessions=len(starts),
        steps=_last_per_step(map(_step, _of(timeline, "step"))),
        validations=_last_per_step(map(_validation, _of(timeline, "validation"))),
        samples=tuple(image for row in _of(timeline, "sample") for image in _images(row)),
        marks=tuple(
            _mark(row) for row in timeline if row["event"] in ("saved", "change", "resumed")
        ),
        problems=tuple(problems if len(problems) >= len(noted) else noted),
        phase_seconds=_phase_seconds(rows),
        end=ends[-1] if ends and ends[-1]["event"] != "run_started" else None,
        unreadable_lines=damaged + damaged_problems,
    )


def number(row: Row, key: str) -> float:
    """Return a number of a row as float, NaN where there is none."""
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def mapping(row: Row, key: str) -> Row:
    """Return an object of a row, an empty one where there is none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def sequence(row: Row, key: str) -> Sequence[Any]:
    """Return a list of a row, an empty one where there is none."""
    value = row.get(key)
    return value if isinstance(value, list) else ()


def _lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows that can be used, and how many lines cannot."""
    if not file.exists():
        return [], 0
    rows = [row for row in read_jsonl(file) if isinstance(row.get("event"), str)]
    usable = [
        row for row in rows if row["event"] not in _STEPPED or isinstance(row.get("step"), int)
    ]
    return usable, sum(1 for line in file.read_bytes().split(b"\n") if line.strip()) - len(usable)


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["event"] == kind]


def _timeline(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that count: a start forgets all steps after the one it resumed from.

    Rows without a step of their own get that of the step before them.
    """
    kept: list[Row] = []
    step = 0
    for row in rows:
        if row["event"] == "run_started":
            resumed_from = row.get("resumed_from")
            step = resumed_from if isinstance(resumed_from, int) else -1
            kept = [earlier for earlier in kept if earlier["step"] <= step]
            step = max(0, step)
        elif row["event"] in _STEPPED:
            step = row["step"]
        kept.append({**row, "step": step})
    return kept


def _last_per_step(rows: Iterable[Stepped]) -> tuple[Stepped, ...]:
    by_step = {row.step: row for row in rows}
    return tuple(by_step[step] for step in sorted(by_step))


def _step(row: Row) -> StepRow:
    figures = {name: number(row, name) for name in STEP_FIGURES}
    return StepRow(step=row["step"], **figures)


def _validation(row: Row) -> ValidationRow:
    pairs = [
        pair for pair in sequence(row, "by_timestep") if isinstance(pair, list) and len(pair) == 2
    ]
    points = [dict(zip(("timestep", "loss"), pair, strict=True)) for pair in pairs]
    return ValidationRow(
        step=row["step"],
        loss=number(row, "loss"),
        images=number(row, "images"),
        by_timestep=tuple((number(point, "timestep"), number(point, "loss")) for point in points),
    )


def _images(row: Row) -> Iterator[SampleImage]:
    for image in sequence(row, "images"):
        if isinstance(image, dict):
            prompt, seed, file = (str(image.get(key, "")) for key in ("prompt", "seed", "file"))
            yield SampleImage(step=row["step"], prompt=prompt, seed=seed, file=file)


def _mark(row: Row) -> MarkRow:
    return MarkRow(kind=row["event"], step=row["step"], fields=row)


def _phase_seconds(rows: Iterable[Row]) -> dict[str, float]:
    """Return the time spent in each phase; the pause between a stop and a resume is no time."""
    spent: dict[str, float] = {}
    phase, since_s = "", math.nan
    for row in rows:
        now_s = number(row, "time")
        if row["event"] == "run_started":
            phase = "plan"
        elif math.isfinite(now_s - since_s):
            spent[phase] = spent.get(phase, 0.0) + max(0.0, now_s - since_s)
        since_s = now_s
        phase = _phase_after(row, phase)
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def _phase_after(row: Row, phase: str) -> str:
    if row["event"] == "phase":
        return str(row.get("phase", phase))
    return "train" if row["event"] == "step" else phase
