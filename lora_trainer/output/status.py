"""How a run is seen and steered from outside: status.json and the control folder.

Inputs: the run's events; the process that writes. Outputs: status.json, replaced atomically but not
fsynced (it describes a live process, which a power cut ends anyway), and the requests that somebody
put into control/ as empty files. A run that claims to live is believed only if its process does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from lora_trainer.errors import MachineError
from lora_trainer.events import Event, EventStream
from lora_trainer.files import json_bytes, write_atomic
from lora_trainer.output.running import measured
from lora_trainer.output.wording import INTERRUPTED_EXIT_CODES, loss_text, one_line

State = Literal["starting", "caching", "training", "finished", "stopped", "failed"]
Seen = Literal["running", "interrupted", "finished", "stopped", "failed"]
Request = Literal["stop", "stop_now", "save", "sample"]

STATUS_FILE = "status.json"
CONTROL_FOLDER = "control"
INTERVAL_S = 0.5
# psutil counts from the time of boot, which moves a little when the clock is corrected.
_START_TOLERANCE_S = 1.0
# What reading a status.json can raise that is missing, damaged or of another making.
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, OverflowError)
_PHASE_STATES: dict[str, State] = {
    "scan": "starting",
    "plan": "starting",
    "load": "starting",
    "cache": "caching",
    "train": "training",
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """What status.json holds; times are Unix times, `exit_code` is None while the run goes on."""

    state: State = "starting"
    pid: int
    pid_started_s: float
    name: str = ""
    step: int = 0
    steps: int = 0
    message: str = ""
    heartbeat_s: float
    exit_code: int | None = None


@dataclass
class StatusWriter:
    """Listener that keeps status.json: at once when state or phase change, else every half second."""

    run_folder: Path
    events: EventStream
    clock: Callable[[], float] = time.time
    status: Status = field(init=False)
    _written: Status | None = field(default=None, init=False)
    _refused: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        process = psutil.Process()
        self.status = Status(
            pid=process.pid,
            pid_started_s=process.create_time(),
            name=self.run_folder.name,
            heartbeat_s=self.clock(),
        )

    def __call__(self, event: Event) -> None:
        """Take an event; a disk that refuses the file is reported once and training goes on."""
        self.status = after(self.status, event)
        # What begins may take minutes without an event: the file must not name what was before it.
        self.beat(at_once=event.kind == "phase" and not event.fields["done"])

    def beat(self, *, at_once: bool = False) -> None:
        """Show that the process lives; cheap enough for every micro-batch."""
        now_s = self.clock()
        last = self._written
        changed = last is None or (last.state, last.exit_code) != (
            self.status.state,
            self.status.exit_code,
        )
        if changed or at_once or last is None or abs(now_s - last.heartbeat_s) >= INTERVAL_S:
            self.status = replace(self.status, heartbeat_s=now_s)
            self._written = self.status
            self._write()

    def _write(self) -> None:
        try:
            write_atomic(
                self.run_folder / STATUS_FILE, json_bytes(asdict(self.status)), durable=False
            )
        except MachineError as error:
            if not self._refused:
                self._refused = True
                self.events.problem(
                    f"the status file is out of date: {error.found}",
                    fix=error.fix,
                    file=STATUS_FILE,
                )


def after(status: Status, event: Event) -> Status:
    """Return the status once `event` has happened; the end of a run is final."""
    fields = event.fields
    if event.kind == "run_started":
        return replace(
            status,
            state="starting",
            name=fields["name"],
            step=fields["resumed_from"] or 0,
            steps=fields["steps"],
            exit_code=None,
        )
    if status.exit_code is not None:
        return status
    if event.kind == "phase":
        message = fields["message"] or fields["phase"]
        return replace(
            status,
            state=_PHASE_STATES.get(fields["phase"], status.state),
            message=one_line(message),
        )
    if event.kind == "step":
        loss = loss_text(measured(fields["loss"]))
        message = f"step {fields['step']} of {status.steps}, loss {loss}"
        return replace(status, state="training", step=fields["step"], message=message)
    if event.kind == "finished":
        return replace(
            status, state="finished", step=fields["step"], message="finished", exit_code=0
        )
    if event.kind == "stopped":
        asked = fields["exit_code"] in INTERRUPTED_EXIT_CODES
        return replace(
            status,
            state="stopped" if asked else "failed",
            step=fields["step"],
            message=one_line(fields["reason"]),
            exit_code=fields["exit_code"],
        )
    return status


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run as others see it: `stage` is what the run wrote last, `state` what is true now."""

    state: Seen
    stage: State
    name: str
    step: int
    steps: int
    message: str
    heartbeat_s: float
    exit_code: int | None
    pid: int | None


def read_status(run_folder: Path) -> RunStatus:
    """Return whether the run lives, has ended, or was interrupted; never raises.

    A missing or unreadable status.json is an interrupted run: it ended before it could say how.
    """
    try:
        status = _read(run_folder)
        alive = lives(pid=status.pid, started_s=status.pid_started_s)
    except _UNREADABLE as error:
        return _unreadable(run_folder, f"{STATUS_FILE} cannot be read: {one_line(str(error))}")
    return RunStatus(
        state=_seen(status, alive=alive),
        stage=status.state,
        name=status.name,
        step=status.step,
        steps=status.steps,
        message=status.message,
        heartbeat_s=status.heartbeat_s,
        exit_code=status.exit_code,
        pid=status.pid if alive else None,
    )


def wrote_status(run_folder: Path, *, pid: int, started_s: float) -> bool:
    """Return whether status.json is the work of that process, dead or alive; never raises."""
    try:
        status = _read(run_folder)
        return status.pid == pid and _same_start(status.pid_started_s, started_s)
    except _UNREADABLE:
        return False


def _read(run_folder: Path) -> Status:
    status = Status(**json.loads((run_folder / STATUS_FILE).read_bytes()))
    if status.state not in get_args(State):
        raise ValueError(status.state)
    return status


def _seen(status: Status, *, alive: bool) -> Seen:
    if status.state in ("finished", "stopped", "failed"):
        return status.state
    return "running" if alive else "interrupted"


def _unreadable(run_folder: Path, message: str) -> RunStatus:
    blank: dict[str, Any] = {
        "step": 0,
        "steps": 0,
        "heartbeat_s": 0.0,
        "exit_code": None,
        "pid": None,
    }
    return RunStatus(
        state="interrupted", stage="starting", name=run_folder.name, message=message, **blank
    )


def lives(*, pid: int, started_s: float) -> bool:
    """Return whether the process of that number and start runs; another of its number does not count.

    Raises ValueError, TypeError or OverflowError for what is no number of a process.
    """
    try:
        process = psutil.Process(pid)
        same = _same_start(process.create_time(), started_s)
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _same_start(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= _START_TOLERANCE_S


@dataclass(frozen=True)
class Control:
    """Requests to a running trainer: one empty file each in the run's control folder."""

    run_folder: Path

    def pending(self) -> set[str]:
        """Return the requests that wait; files of other names are not requests."""
        folder = self.run_folder / CONTROL_FOLDER
        try:
            names = {entry.name for entry in os.scandir(folder)}
        except OSError:  # no folder, no requests
            return set()
        return names & set(get_args(Request))

    def done(self, name: str) -> None:
        """Remove a request that was obeyed."""
        (self.run_folder / CONTROL_FOLDER / name).unlink(missing_ok=True)

    def request(self, name: Request) -> None:
        """Ask the run that trains in this folder for something; raises OSError."""
        folder = self.run_folder / CONTROL_FOLDER
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
