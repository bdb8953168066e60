"""Longer commands that a page starts: captioning, sampling, merging, converting.

Inputs: a command line as a list of words. Outputs: `<runs>/.gui/jobs/ID/` with job.json, the
command's output in log.txt and, once it has ended, result.json. A small process of its own session
(job_runner.py) runs the command, so that its exit code is known also when the interface was ended
meanwhile; what a page shows is a function of these files. Drawing is handed to a process that keeps its base loaded
(drawing.py), which writes the same files.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, locked, read_json_object, write_atomic
from lora_trainer.common.processes import ask_to_end, detached, is_alive
from lora_trainer.common.wording import one_line
from lora_trainer.reporting.history import mapping, number, sequence

from .workplace import Workplace

State = Literal["running", "finished", "failed"]
JOB_FILE, RESULT_FILE, LOG_FILE, RUNNER_FILE = "job.json", "result.json", "log.txt", "runner.json"
FOLDER, LOCK = "jobs", "jobs.lock"
MAX_KEPT = 60
_LOCK_WITHIN_S = 10.0
_ID = re.compile(r"[0-9a-f]{12,20}")
_LOG_END_BYTES = 16_384
_STARTING_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that was started; `about` is what its page wants to remember of it."""

    id: str
    folder: Path
    kind: str
    argv: tuple[str, ...]
    about: Mapping[str, Any]
    state: State
    exit_code: int | None

    def log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines of the command's output; a progress bar counts as its last state."""
        try:
            with (self.folder / LOG_FILE).open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _LOG_END_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        shown = [line.rpartition("\r")[2] for line in text.rstrip().splitlines()]
        return [line for line in shown if line.strip()][-lines:]

    def error(self) -> str:
        """Return the line in which the command refused or failed, an empty one otherwise."""
        if self.state != "failed":
            return ""
        tail = self.log_tail(1)
        if tail:
            return one_line(tail[0])
        known = self.exit_code is not None
        return f"it ended with exit code {self.exit_code}" if known else "it ended without a word"


def start(
    work: Workplace, *, kind: str, argv: Sequence[str], about: Mapping[str, Any] | None = None
) -> Job:
    """Start a command; raises RequestError when the same one runs already, MachineError."""
    with _changing(work):
        if any(job.argv == tuple(argv) for job in find(work, kind=kind) if job.state == "running"):
            raise RequestError("this runs already", fix="wait for it to end")
        folder = _written(work, kind=kind, argv=argv, about=about)
        try:
            runner = subprocess.Popen(
                [sys.executable, "-m", "lora_trainer.gui.job_runner", str(folder)],
                **detached(
                    subprocess.DEVNULL
                ),  # a Ctrl-C meant for the interface does not reach it
            )
        except OSError as error:
            raise disk_error(folder, error) from error
    threading.Thread(target=runner.wait, daemon=True).start()  # it would stay as a zombie
    return read(work, folder.name)


def hand_over(work: Workplace, *, kind: str, about: Mapping[str, Any]) -> Job:
    """Write down a job that a process takes which runs already, or is about to.

    The process says so by `take` and `end`. Raises RequestError while it does another job of the kind, MachineError.
    """
    with _changing(work):
        if any(job.state == "running" for job in find(work, kind=kind)):
            raise RequestError("this runs already", fix="wait for it to end, or stop it")
        folder = _written(work, kind=kind, argv=(), about=about)
    return read(work, folder.name)


def take(folder: Path, *, pid: int | None = None) -> None:
    """Write down that this process does the job of a folder, or that of the number `pid`; raises MachineError."""
    me = psutil.Process(pid)
    runner = {"pid": me.pid, "started_s": me.create_time()}
    write_atomic(folder / RUNNER_FILE, json_bytes(runner), durable=False)


def end(folder: Path, exit_code: int) -> None:
    """Write down how the job of a folder ended; raises MachineError."""
    write_atomic(folder / RESULT_FILE, json_bytes({"exit_code": exit_code}), durable=False)


def _changing(work: Workplace) -> AbstractContextManager[None]:
    busy = MachineError("another page starts something", fix="try again in a moment")
    return locked(work.own / LOCK, within_s=_LOCK_WITHIN_S, busy=busy)


def _written(
    work: Workplace, *, kind: str, argv: Sequence[str], about: Mapping[str, Any] | None
) -> Path:
    """Write the record of a new job; return its folder. Raises MachineError."""
    _forget_old(work)
    folder = work.own / FOLDER / f"{time.time_ns():x}"
    content = {
        "kind": kind,
        "argv": list(argv),
        "about": dict(about or {}),
        "at_s": time.time(),
    }
    try:
        folder.mkdir(parents=True)
        write_atomic(folder / JOB_FILE, json_bytes(content), durable=False)
    except OSError as error:
        raise disk_error(folder, error) from error
    return folder


def _forget_old(work: Workplace) -> None:
    """Remove the records of all but the newest jobs: pages read them all, once a second."""
    old = sorted((work.own / FOLDER).glob("*"), reverse=True)[MAX_KEPT:]
    for folder in old:
        try:
            ended = read(work, folder.name).state != "running"
        except RequestError:  # damaged, and nobody will mend it
            ended = True
        if ended:
            shutil.rmtree(folder, ignore_errors=True)


def read(work: Workplace, job_id: str) -> Job:
    """Return a job; raises RequestError for an unknown id or a damaged record."""
    folder = work.own / FOLDER / job_id
    if not _ID.fullmatch(job_id) or not (folder / JOB_FILE).is_file():
        raise RequestError(f"the job {job_id!r} does not exist", fix="start it again")
    record = read_json_object(folder / JOB_FILE)
    begun_s = number(record, "at_s")
    state, exit_code = _state(folder, begun_s=begun_s if math.isfinite(begun_s) else 0.0)
    return Job(
        id=job_id,
        folder=folder,
        kind=str(record.get("kind")),
        argv=tuple(map(str, sequence(record, "argv"))),
        about=mapping(record, "about"),
        state=state,
        exit_code=exit_code,
    )


def stop(job: Job) -> None:
    """Ask a running job to end; it then counts as failed."""
    runner = _record(job.folder / RUNNER_FILE)
    if job.state == "running" and runner is not None and _lives(runner):
        ask_to_end(int(runner["pid"]))


def find(work: Workplace, *, kind: str) -> list[Job]:
    """Return the jobs of a kind, the newest first; damaged records are left out."""
    found = []
    for folder in sorted((work.own / FOLDER).glob("*"), reverse=True):
        try:
            job = read(work, folder.name)
        except RequestError:
            continue
        if job.kind == kind:
            found.append(job)
    return found


def _state(folder: Path, *, begun_s: float) -> tuple[State, int | None]:
    # The runner before the result: one that ends in between has written its result by then.
    runner = _record(folder / RUNNER_FILE)
    starting = runner is None and time.time() - begun_s < _STARTING_WITHIN_S
    runs = starting or (runner is not None and _lives(runner))
    result = _record(folder / RESULT_FILE)
    if result is None:
        return ("running" if runs else "failed"), None
    code = result.get("exit_code")
    return ("finished" if code == 0 else "failed"), code


def _record(file: Path) -> Mapping[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return read_json_object(file)
    except RequestError:
        return None


def _lives(runner: Mapping[str, Any]) -> bool:
    try:
        return is_alive(pid=int(runner["pid"]), started_s=float(runner["started_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
