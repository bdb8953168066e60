"""An event is the same as an object and as a row, and a row of another release or of a damaged file breaks nothing."""

from __future__ import annotations

import json
import math
import tarfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.event_kinds import (
    KINDS,
    Change,
    Event,
    Problem,
    RunStarted,
    SampleFile,
    Samples,
    Step,
    UnknownEvent,
    Validation,
    event_of_row,
)

WRONG: tuple[Any, ...] = ({"a": 1}, [1], [[1, 2], "x"], "text", None, -1e400, math.nan, True, -1)
RELEASES = sorted((Path(__file__).parents[1] / "fakes").glob("release_*"))


def row_of(event: Event) -> dict[str, Any]:
    row = {"event": event.kind, **event.fields}
    parsed: dict[str, Any] = json.loads(json.dumps(row, allow_nan=False))
    return parsed


def test_rows_have_the_names_and_the_order_of_events_jsonl() -> None:
    sample = SampleFile(prompt="a cat --w 64", seed=7, file="samples/step-00000002/00.png")
    drawn = Samples(step=2, images=[sample], seconds=0.5)
    image = {"prompt": sample.prompt, "seed": 7, "file": sample.file}
    validation = Validation(
        step=0, loss=math.nan, by_timestep=((62, math.inf),), images=2, seconds=1
    )
    change = Change(key="memory.micro_batch", old=4, new=2, reason="out of memory")
    for event, expected in (
        (drawn, {"step": 2, "images": [image], "seconds": 0.5}),
        (
            validation,
            {"step": 0, "loss": None, "by_timestep": [[62, None]], "images": 2, "seconds": 1},
        ),
        (change, {"key": "memory.micro_batch", "old": 4, "new": 2, "reason": "out of memory"}),
    ):
        assert event.fields == expected and list(event.fields) == list(expected)
    asked = Samples(step=2, images=[], seconds=0.5, asked=True)
    assert list(asked.fields) == ["step", "images", "seconds", "asked"], "only where somebody asked"
    lowered = Change(step=3, key="k", old=1, new=2, reason="r")
    assert list(lowered.fields) == ["step", "key", "old", "new", "reason"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_row_that_lacks_all_or_has_anything_is_an_event_that_can_be_written(
    kind: type[Event],
) -> None:
    names = [entry.name for entry in fields(kind) if entry.name != "time_s"]
    bare = event_of_row({"event": kind.kind, "step": 1})
    assert type(bare) is kind and row_of(bare).keys() <= {"event", *names}
    for name in names:
        for wrong in WRONG:
            event = event_of_row({"event": kind.kind, "step": 1, name: wrong})
            if event is None:
                assert name == "step"
                continue
            again = event_of_row(row_of(event))
            assert again is not None and row_of(again) == row_of(event)


def test_what_is_not_known_is_said_so() -> None:
    started = event_of_row({"event": "run_started", "steps": "many", "resumed_from": -1})
    assert isinstance(started, RunStarted)
    assert math.isnan(started.steps) and started.resumed_from is None and started.base == ""
    step = event_of_row({"event": "step", "step": 3, "loss": 1e200, "lr": True, "extra": 1})
    assert isinstance(step, Step)
    assert math.isnan(step.loss) and math.isnan(step.lr) and step.vram_bytes == 0
    problem = event_of_row({"event": "problem", "what": "w", "severity": "fatal"})
    assert isinstance(problem, Problem) and problem.severity == "warning"
    unknown = event_of_row({"event": "of tomorrow"})
    assert isinstance(unknown, UnknownEvent) and unknown.name == "of tomorrow"
    for row in ({}, {"event": 1}, {"event": "step"}, {"event": "saved", "step": -1}):
        assert event_of_row(row) is None


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_the_events_of_earlier_releases_are_read_whole(release: Path) -> None:
    with tarfile.open(release / "run.tar.xz") as archive:
        files = [name for name in archive.getnames() if name.endswith("events.jsonl")]
        rows = [
            json.loads(line)
            for name in files
            if (opened := archive.extractfile(name)) is not None
            for line in opened.read().decode().splitlines()
        ]
    assert {row["event"] for row in rows} >= {"run_started", "step", "saved"}
    for row in rows:
        event = event_of_row(row)
        assert event is not None and not isinstance(event, UnknownEvent)
        mine = {"event": event.kind, **event.fields, "time": event.time_s}
        assert {key: value for key, value in mine.items() if key in row} == row
