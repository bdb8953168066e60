"""The event stream and its record on disk: order, tears, a disk that refuses."""

from __future__ import annotations

import json
from pathlib import Path

from lora_trainer.common import events as ev


def test_every_listener_gets_every_event_in_order_without_secrets() -> None:
    events = ev.EventStream(clock=lambda: 12.34567)
    calls: list[tuple[int, ev.Event]] = []
    for number in (1, 2):
        events.subscribe(lambda event, number=number: calls.append((number, event)))
    events.emit("step", step=3, loss=0.5)
    events.problem("it broke at https://me:word@host", fix="mend it", file="a.png", code="IMG-01")
    problem = {"what": "it broke at https://host", "fix": "mend it", "severity": "warning"}
    expected = (
        ev.Event(kind="step", fields={"step": 3, "loss": 0.5}, time_s=12.34567),
        ev.Event(
            kind="problem", fields={**problem, "file": "a.png", "code": "IMG-01"}, time_s=12.34567
        ),
    )
    assert calls == [(number, event) for event in expected for number in (1, 2)]


def test_the_record_goes_on_where_it_was_without_other_kinds_torn_and_foreign_lines(
    tmp_path: Path,
) -> None:
    file, written = tmp_path / "e.jsonl", {"event": "step", "text": "é\n\u2028", "time": 12.346}
    assert ev.read_jsonl(file) == []
    for count in (1, 2, 3):
        events = ev.EventStream(clock=lambda: 12.34567)
        events.subscribe(
            ev.JsonlWriter(path=file, kinds=lambda kind: kind == "step", events=events)
        )
        events.emit("step", text="é\n\u2028")
        events.emit("other")
        assert ev.read_jsonl(file) == [written] * count, "on disk at once"
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [written] * 3
    file.write_bytes(b'{"a": 1}\n[2]\nnonsense\n\n\xff\n{"b": 2}\n{"c": ')
    assert ev.read_jsonl(file) == [{"a": 1}, {"b": 2}]


def test_a_disk_that_refuses_is_one_problem_and_no_crash(tmp_path: Path) -> None:
    events, seen = ev.EventStream(), list[ev.Event]()
    events.subscribe(seen.append)
    path = tmp_path / "no folder" / "e.jsonl"
    events.subscribe(ev.JsonlWriter(path=path, kinds=lambda _: True, events=events))
    for _ in range(3):
        events.emit("step")
    (problem,) = (event.fields for event in seen if event.kind == "problem")
    assert problem["code"] == "TRN-05" and "e.jsonl is no longer written" in problem["what"]
