"""The event stream and its record on disk: order, tears, a disk that refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_trainer.common.events import Event, EventStream, JsonlWriter, read_jsonl


def test_every_listener_gets_every_event_in_order_without_secrets() -> None:
    events = EventStream(clock=lambda: 12.34567)
    calls: list[tuple[int, Event]] = []
    for number in (1, 2):
        events.subscribe(lambda event, number=number: calls.append((number, event)))
    events.emit("step", step=3, loss=0.5)
    events.problem("it broke at https://me:word@host", fix="mend it", file="a.png", code="IMG-01")
    assert [(number, event.kind) for number, event in calls] == [
        (1, "step"), (2, "step"), (1, "problem"), (2, "problem"),
    ]  # fmt: skip
    assert calls[0][1] == Event(kind="step", fields={"step": 3, "loss": 0.5}, time_s=12.34567)
    assert dict(calls[2][1].fields) == {
        "what": "it broke at https://host",
        "fix": "mend it",
        "severity": "warning",
        "file": "a.png",
        "code": "IMG-01",
    }


def test_the_record_has_the_wanted_kinds_and_goes_on_where_it_was(tmp_path: Path) -> None:
    file, written = tmp_path / "e.jsonl", {"event": "step", "text": "é\n\u2028", "time": 12.346}
    for count in (1, 2, 3):
        events = EventStream(clock=lambda: 12.34567)
        events.subscribe(JsonlWriter(path=file, kinds=lambda kind: kind == "step", events=events))
        events.emit("step", text="é\n\u2028")
        events.emit("other")
        assert read_jsonl(file) == [written] * count, "on disk at once"
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [written] * 3


def test_a_disk_that_refuses_is_one_problem_and_no_crash(tmp_path: Path) -> None:
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    path = tmp_path / "no folder" / "e.jsonl"
    events.subscribe(JsonlWriter(path=path, kinds=lambda _: True, events=events))
    for _ in range(3):
        events.emit("step")
    problems: list[Any] = [event.fields for event in seen if event.kind == "problem"]
    assert [problem["code"] for problem in problems] == ["TRN-05"]
    assert "e.jsonl is no longer written" in problems[0]["what"]


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_bytes(b'{"a": 1}\n[2]\nnonsense\n\n\xff\n{"b": 2}\n{"c": ')
    assert read_jsonl(file) == [{"a": 1}, {"b": 2}]
    assert read_jsonl(tmp_path / "none.jsonl") == []
