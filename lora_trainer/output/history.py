"""What a run folder tells about its run: typed rows of run.json, events.jsonl and problems.jsonl.

Input: rows as they were written. Output: the parts of a `History`; history_reader.py reads the files
and puts them together. A figure that is missing or of another type is NaN, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


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


def step_row(row: Row) -> StepRow:
    """Return one optimizer step of its event."""
    return StepRow(step=row["step"], **{name: number(row, name) for name in STEP_FIGURES})


def validation_row(row: Row) -> ValidationRow:
    """Return one validation of its event."""
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


def sample_images(row: Row) -> Iterator[SampleImage]:
    """Yield the images of a sample event."""
    for image in sequence(row, "images"):
        if isinstance(image, dict):
            prompt, seed, file = (str(image.get(key, "")) for key in ("prompt", "seed", "file"))
            yield SampleImage(step=row["step"], prompt=prompt, seed=seed, file=file)
