"""The event stream and its record on disk: order, tears, a disk that refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import first_line
from lora_trainer.common.events import Event, EventStream, JsonlWriter, read_jsonl


def stream() -> tuple[EventStream, list[Event]]:
    events, seen = EventStream(clock=lambda: 12.34567), []  # type: ignore[var-annotated]
    events.subscribe(seen.append)
    return events, seen


def writer(path: Path, events: EventStream, *kinds: str) -> None:
    events.subscribe(
        JsonlWriter(path=path, kinds=lambda kind: not kinds or kind in kinds, events=events)
    )


def test_every_listener_gets_every_event_in_order_without_secrets() -> None:
    events, seen = stream()
    calls: list[tuple[int, str]] = []
    for number in (1, 2):
        events.subscribe(lambda event, number=number: calls.append((number, event.kind)))
    events.emit("step", step=3, loss=0.5)
    events.problem("it broke at https://me:word@host", fix="mend it", file="a.png", code="IMG-01")
    assert calls == [(1, "step"), (2, "step"), (1, "problem"), (2, "problem")]
    step, problem = seen
    assert step == Event(kind="step", fields={"step": 3, "loss": 0.5}, time_s=12.34567)
    assert dict(problem.fields) == {
        "what": "it broke at https://host",
        "fix": "mend it",
        "severity": "warning",
        "file": "a.png",
        "code": "IMG-01",
    }


def test_the_record_is_one_object_a_line_of_the_wanted_kinds(tmp_path: Path) -> None:
    events, _ = stream()
    writer(tmp_path / "e.jsonl", events, "step")
    events.emit("step", text="é\n\u2028")
    events.emit("other")
    events.emit("step", text="b")
    lines = (tmp_path / "e.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"event": "step", "text": "é\n\u2028", "time": 12.346},
        {"event": "step", "text": "b", "time": 12.346},
    ]
    assert lines[-1] == ""
    assert read_jsonl(tmp_path / "e.jsonl") == [json.loads(line) for line in lines[:-1]]


def test_each_line_is_on_disk_at_once_and_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        events, _ = stream()
        writer(tmp_path / "e.jsonl", events)
        events.emit("step")
        assert len(read_jsonl(tmp_path / "e.jsonl")) == count


def test_a_disk_that_refuses_is_one_problem_and_no_crash(tmp_path: Path) -> None:
    events, seen = stream()
    writer(tmp_path / "no folder" / "e.jsonl", events)
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


def test_a_library_s_error_is_one_line_and_never_empty() -> None:
    assert first_line(RuntimeError("out of memory\nTried to allocate")) == "out of memory"
    assert first_line(NotImplementedError()) == "NotImplementedError"
