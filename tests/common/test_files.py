"""Files that are whole or absent, capped folders, the event stream and its record; memory that is given back."""

from __future__ import annotations

import gc
import json
import os
import platform
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_trainer.common import events as ev
from lora_trainer.common import files, processes
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.event_kinds import Change, Cores, Event, Problem
from tests.fakes.made_events import made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["a.bin", "x" * 250, "😀" * 62])
def test_a_write_replaces_the_whole_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: usual(descriptor, data[:70_000]))
    file = tmp_path / name
    for data in (b"long" * 1_000_000, b"", b"short"):
        files.write_atomic(file, data, durable=data == b"")
        assert file.read_bytes() == data
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_refused_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = tmp_path / "a.bin"
    files.write_atomic(file, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if step == "replace" else os, step, refuse)
    with pytest.raises(MachineError, match=r"a.bin: No space left on device \([\d,]+ bytes free\)"):
        files.write_atomic(file, b"new")
    monkeypatch.undo()
    assert file.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]
    with pytest.raises(MachineError, match="nowhere"):
        files.write_atomic(tmp_path / "nowhere" / "a", b"x")


def test_a_durable_write_flushes_file_then_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder after the rename, or a power cut could lose the name."""
    order: list[str] = []

    def watch(owner: Any, name: str, kind: Callable[[Any], str]) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (order.append(kind(a[0])), real(*a))[1])

    watch(os, "fsync", lambda fd: "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    watch(Path, "replace", lambda _: "rename")
    files.write_atomic(tmp_path / "a", b"x")
    files.write_atomic(tmp_path / "a", b"x", durable=False)
    assert order == ["file", "rename", "folder", "rename"]


def test_json_is_written_readably_and_read_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert files.json_bytes({"a": "é"}) == '{\n  "a": "é"\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.json_bytes({"a": float("nan")})
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"a": [1, {"b": null}]}')
    assert files.read_json_object(file) == {"a": [1, {"b": None}]}
    with pytest.raises(RequestError, match="cannot read"):
        files.read_json_object(tmp_path / "none.json")


def test_the_least_recently_used_go_first_in_a_folder_with_our_marker(tmp_path: Path) -> None:
    folder = files.CappedFolder(root=tmp_path / "cache", limit_bytes=250)
    folder.create()
    ages_s = {"new": 20, "older": 30, "oldest": 40, "read": 50, ".tmp-1-a": 60}
    (folder.root / "k").mkdir()
    made = {name: folder.root / "k" / name for name in ages_s}
    for name, file in made.items():
        file.write_bytes(bytes(100))
        changed_ns = time.time_ns() - int(ages_s[name] * 1e9)
        os.utime(file, ns=(time.time_ns() if name == "read" else changed_ns, changed_ns))
    assert folder.used_bytes() == 400, "without the marker and temporary files"
    assert folder.prune(keep=[]) == 200
    assert names(folder.root / "k") == [".tmp-1-a", "new", "read"], "reading counts as use"
    assert folder.prune(keep=[]) == 0
    assert replace(folder, limit_bytes=0).prune(keep=[made["new"]]) == 100
    assert [path.name for path, _ in folder.files()] == ["new"], "in use, and over the limit"
    with pytest.raises(MachineError, match="cannot write"):
        files.CappedFolder(root=made["new"] / "cache", limit_bytes=0).create()
    assert files.CappedFolder(root=folder.root / "k", limit_bytes=0).prune(keep=[]) == 0, (
        "no marker"
    )


# ---- events


def test_every_listener_gets_every_event_in_order_without_secrets() -> None:
    events = ev.EventStream(clock=lambda: 12.34567)
    calls: list[tuple[int, Event]] = []
    for number in (1, 2):
        events.subscribe(lambda event, number=number: calls.append((number, event)))
    cores = Cores(taken=0.5, threads=3, waiting="asleep")
    events.emit(cores)
    events.problem("it broke at https://me:word@host", fix="mend it", file="a.png", code="IMG-01")
    problem = Problem(
        what="it broke at https://host",
        fix="mend it",
        severity="warning",
        file="a.png",
        code="IMG-01",
        time_s=12.34567,
    )
    assert calls == [
        (number, event) for event in (replace(cores, time_s=12.34567), problem) for number in (1, 2)
    ]


def test_the_record_goes_on_where_it_was_without_other_kinds_torn_and_foreign_lines(
    tmp_path: Path,
) -> None:
    file, words = tmp_path / "e.jsonl", "é\n\u2028"
    written = {"event": "change", "key": "k", "old": 1, "new": 2, "reason": words, "time": 12.346}
    assert ev.read_jsonl(file) == []
    for count in (1, 2, 3):
        events = ev.EventStream(clock=lambda: 12.34567)
        events.subscribe(
            ev.JsonlWriter(path=file, takes=lambda event: event.kind == "change", events=events)
        )
        events.emit(Change(key="k", old=1, new=2, reason=words))
        events.emit(made("step"))
        assert ev.read_jsonl(file) == [written] * count, "on disk at once"
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [written] * 3
    file.write_bytes(b'{"a": 1}\n[2]\nnonsense\n\n\xff\n{"b": 2}\n{"c": ')
    assert ev.read_jsonl(file) == [{"a": 1}, {"b": 2}]


def test_a_disk_that_refuses_is_one_problem_and_no_crash(tmp_path: Path) -> None:
    events, seen = ev.EventStream(), list[Event]()
    events.subscribe(seen.append)
    path = tmp_path / "no folder" / "e.jsonl"
    events.subscribe(ev.JsonlWriter(path=path, takes=lambda _: True, events=events))
    for _ in range(3):
        events.emit(made("step"))
    (problem,) = (event.fields for event in seen if event.kind == "problem")
    assert problem["code"] == "TRN-05" and "nothing more is written to e.jsonl" in problem["what"]


# ---- this process


def test_the_collector_of_cycles_rests_inside_and_goes_on_after_a_failure() -> None:
    with pytest.raises(ValueError, match="mine"), processes.gc_disabled():
        with processes.gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one leaves it to the outer one"
        raise ValueError("mine")
    assert gc.isenabled()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_goes_back_to_the_system() -> None:
    """128 MiB in pieces as of a training step, the last of which keeps all before it in the heap."""
    pieces = [bytearray(b"x" * 2**17) for _ in range(2**10)]
    last = pieces[-1]
    pieces.clear()
    resident_bytes = psutil.Process().memory_info().rss
    processes.give_back_heap()
    assert resident_bytes - psutil.Process().memory_info().rss > 2**26
    assert len(last) == 2**17
