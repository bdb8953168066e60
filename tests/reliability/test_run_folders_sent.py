"""A run folder that somebody sent, or edited: whatever its files are and hold, its readers answer, and at once."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_trainer.checkpoint.states import load_newest
from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import json_bytes, read_json_object, read_regular, sha256_file
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.report import write_report
from lora_trainer.reporting.sample_files import last_samples, sample_prompt
from lora_trainer.reporting.status import STATUS_FILE, read_status, wrote_status
from lora_trainer.run.run_folder import last_step, read_run
from tests.fakes.run_folder import fake_run

NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]
ODD: tuple[Any, ...] = (
    {}, [], [[]], {"a": {"b": [1]}}, "", "x\u202ey\x1b[31m\ud800", -1, 0, True, None, 1.5, 10**400, -(10**400),
    2**63, float("nan"), float("inf"), float("-inf"), 1e308, NESTED,
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
NO_OBJECTS = (
    "",
    "null",
    "[]",
    "7",
    "{",
    "\x00",
    '{"a":1}{',
    DEEP,
    f'{{"state":{DEEP}}}',
    "\ufeff{}",
)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with one finished run."""
    runs = tmp_path_factory.mktemp("runs")
    run = fake_run(runs / "run", steps=8)
    run.write()
    status = {
        "state": "finished", "pid": 1, "pid_started_s": 1.0, "name": "run", "step": 4, "steps": 4,
        "phase": "export", "done": 0, "total": 0, "message": "", "heartbeat_s": 1.0, "left_s": 2.0, "exit_code": 0,
    }  # fmt: skip
    (runs / "run" / STATUS_FILE).write_bytes(json_bytes(status))
    return runs


def changed(value: Any) -> Iterator[Any]:
    """Yield `value` with each of its entries, at any depth, replaced in turn by something odd."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        for odd in ODD:
            other = copy.copy(value)
            other[key] = odd
            yield other
        if isinstance(value[key], dict | list):
            for inner in changed(value[key]):
                other = copy.copy(value)
                other[key] = inner
                yield other


def ask_everything(runs: Path) -> None:
    """Ask whatever reads a run's status and the queue; none of it may raise."""
    run = runs / "run"
    status = read_status(run)
    asdict(status)
    f"{status.step:,} {status.steps:,} {status.left_s:.1f} {time.gmtime(status.heartbeat_s)}".encode()
    status.message.encode()
    wrote_status(run, pid=1, started_s=1.0)
    worker.outside(runs, [])
    for item in commands.items(runs):
        commands.resumes(runs, item)
        commands.download_of(runs, item)
        json_bytes(asdict(item))


def test_status_json_of_any_types(sent: Path) -> None:
    file = sent / "run" / STATUS_FILE
    whole = file.read_bytes()
    try:
        for value in changed(json.loads(whole)):
            file.write_text(json.dumps(value), "utf-8", newline="\n")
            ask_everything(sent)
        for text in NO_OBJECTS:
            file.write_text(text, "utf-8", newline="\n")
            assert read_status(sent / "run").state == "interrupted"
            ask_everything(sent)
    finally:
        file.write_bytes(whole)


def test_items_of_any_types(sent: Path) -> None:
    item = commands.Item(
        id="0001-a", order=1, argv=("a",), folder="/", label="a", state="running", added_s=1.0,
        started_s=2.0, ended_s=3.0, pid=2**30, pid_started_s=1.0, run="run", exit_code=0,
    )  # fmt: skip
    folder = commands.queue_folder(sent)
    folder.mkdir()
    whole = json.loads(json_bytes(asdict(item)))
    texts = (json.dumps(value) for value in changed(whole))
    try:
        for text in (*texts, *NO_OBJECTS):
            (folder / "0001-a.json").write_text(text, "utf-8", newline="\n")
            ask_everything(sent)
        download = {"source": "a", "here_bytes": 1, "all_bytes": 2}
        waiting = {**whole, "run": None}
        (folder / "0001-a.json").write_bytes(json_bytes(waiting))
        for text in (*(json.dumps(value) for value in changed(download)), *NO_OBJECTS):
            (folder / "0001-a.download").write_text(text, "utf-8", newline="\n")
            ask_everything(sent)
        note = {"pid": 1, "pid_started_s": 1.0}
        for text in (*(json.dumps(value) for value in changed(note)), *NO_OBJECTS):
            (folder / ".worker.json").write_text(text, "utf-8", newline="\n")
            worker.worker_pid(sent)
            worker.worker_fault(sent)
        (folder / ".last-number").write_text("9" * 5000, "utf-8", newline="\n")
        commands.new_id(sent, label="a")
        (folder / ".last-number").write_text("9" * 12, "utf-8", newline="\n")
        assert len(commands.new_id(sent, label="a").partition("-")[0]) <= 9
    finally:
        shutil.rmtree(folder)


def test_records_of_any_types(sent: Path) -> None:
    """One event of each kind with each of its values odd, in one file; and run.json, whole otherwise."""
    run = sent / "run"
    events = run / "events.jsonl"
    whole, lines = events.read_bytes(), events.read_bytes().splitlines()
    kinds = {json.loads(line)["event"]: line for line in lines}
    more = [json.dumps(value) for line in kinds.values() for value in changed(json.loads(line))]
    record = (run / "run.json").read_bytes()
    try:
        events.write_text(
            "\n".join([*map(bytes.decode, lines), *more, DEEP]), "utf-8", newline="\n"
        )
        history = read_history(run)
        assert history.steps and history.unreadable_lines
        last_step(run)
        write_report(run)
        events.write_bytes(whole)
        value = json.loads(record)
        # Whole groups at once: a report takes a tenth of a second.
        for odd in ODD:
            try:
                text = json.dumps({key: odd for key in value} | {"settings": {"train.steps": odd}})
                (run / "run.json").write_text(text, "utf-8", newline="\n")
                write_report(run)
            except RequestError as error:
                assert "run.json" in str(error), "one that says what cannot be read"
            with pytest.raises(RequestError):
                read_run(run)
    finally:
        events.write_bytes(whole)
        (run / "run.json").write_bytes(record)


def pipe(file: Path) -> None:
    os.mkfifo(file)


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def zero(file: Path) -> None:
    file.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], object]] = {
    "status.json": lambda run: read_status(run),
    "run.json": read_history,
    "events.jsonl": read_history,
    "problems.jsonl": read_history,
    "validation.json": write_report,
    "samples/step-00000002/00.png": write_report,
    "control/stop": lambda run: Control(run).pending(),
    "control/sample": lambda run: Control(run).take_samples(),
    "states/step-00000004/manifest.json": lambda run: load_newest(
        run / "states", events=EventStream()
    ),
    "report.html": write_report,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("make", [pipe, loop, zero, Path.mkdir])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_not_waited_for(
    name: str, make: Callable[[Path], None], sent: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(sent / "run", tmp_path / "run")
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    make(file)
    try:
        READERS[name](run)
    except LoraTrainError as error:
        assert file.name in str(error)
    for image in last_samples(run / "samples"):
        sample_prompt(image)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_regular, sha256_file):
            with pytest.raises(OSError, match="not a regular file"):
                read(path)
        with pytest.raises(RequestError, match="not a regular file"):
            read_json_object(path)


def test_a_process_that_is_ours_is_alive_to_readers(sent: Path) -> None:
    """The bounds of the values must not refuse a true status."""
    file = sent / "run" / STATUS_FILE
    whole = file.read_bytes()
    own = psutil.Process()
    now = {
        **json.loads(whole),
        "state": "training",
        "pid": own.pid,
        "pid_started_s": own.create_time(),
    }
    file.write_bytes(json_bytes({**now, "exit_code": None, "left_s": None}))
    assert read_status(sent / "run").state == "running"
    file.write_bytes(whole)
