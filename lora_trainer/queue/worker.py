"""The worker of a training queue: one process for each queue, started when needed, ends when idle.

It starts waiting items, one per device, and records how each ended. Inputs: the items of a runs folder, the devices.
Outputs: trainers in their own sessions, which outlive the worker, and item files with their state; `.worker.lock`,
held by the worker; `.worker.json`, its process; `.worker.log`, its output. It may be killed at any time: a trainer
is identified by process number and start time, so the next worker finds trainings that the last one left running.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
from pydantic import Field, FiniteFloat, TypeAdapter

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import (
    disk_error,
    json_bytes,
    locked,
    open_regular,
    read_regular,
    write_atomic,
)
from lora_trainer.common.processes import detached, end_of, is_alive, was_killed
from lora_trainer.common.wording import (
    INTERRUPTED_EXIT_CODES,
    duration_text,
    one_line,
    without_secrets,
)
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.planning.known_pace import load_factor
from lora_trainer.queue.commands import (
    ITEM_VARIABLE,
    Item,
    State,
    changing,
    in_order,
    item_file,
    items,
    queue_folder,
    write,
)
from lora_trainer.queue.notices import Notice, read_notices, send
from lora_trainer.queue.rules import environment_of, read_rules, take_up_stopped
from lora_trainer.reporting.status import STATUS_FILE, read_status, wrote_status

TRAINER = (sys.executable, "-m", "lora_trainer")
_DEVICES = "CUDA_VISIBLE_DEVICES"
_LOG_END_BYTES = 4096
_STATUS_FILES = f"*/{STATUS_FILE}"
_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


def slots(hardware: Hardware, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES for each training that can run at the same time; "": leave it unchanged."""
    if hardware.accelerator()[0] is None or len(hardware.gpus) == 1:
        return ("",)
    chosen = environment.get(_DEVICES)
    if (
        chosen is not None
    ):  # the user's own words: `gpu.index` counts the GPUs that they made visible
        words = [word.strip() for word in chosen.split(",")]
        return tuple(words[gpu.index] for gpu in hardware.gpus)
    return tuple(gpu.uuid or str(gpu.index) for gpu in hardware.gpus)


@dataclass(frozen=True, kw_only=True)
class Child:
    """A trainer that this worker started; its output begins at `log_from_bytes` of the item's log."""

    process: subprocess.Popen[bytes]
    started_s: float
    log_from_bytes: int


@dataclass(kw_only=True)
class Worker:
    """Starts and follows the trainings of one queue; a command is `trainer` with the item's words."""

    runs: Path
    slots: Sequence[str]
    trainer: Sequence[str] = TRAINER
    clock: Callable[[], float] = time.time
    say: Callable[[str], None] = lambda _: None
    is_idle: Callable[[], bool] = lambda: True
    """Whether no other program uses the device, asked before a start that waits for that."""
    tell: Callable[[Item], None] = lambda _: None
    """Gets each item that has ended, once that is written down."""
    children: dict[str, Child] = field(default_factory=dict)

    def tick(self) -> bool:
        """Record ended trainings and start waiting ones on free devices; return whether items are left.

        Raises MachineError if the disk refuses; the next tick then does the rest.
        """
        take_up_stopped(self.runs)
        with changing(self.runs):
            for item in items(self.runs):
                if item.state == "running":
                    self._follow(item)
            present = items(self.runs)
            waiting = in_order(present)
            if waiting and not self.holds():
                running = [item for item in present if item.state == "running"]
                busy = {item.device for item in running}
                free = [slot for slot in self.slots if slot not in busy]
                # A training that the user started by hand takes a device, presumably the first, so the
                # last ones count as free.
                room = len(self.slots) - len(running) - len(outside(self.runs, running))
                for item, device in zip(waiting, free[-room:] if room > 0 else (), strict=False):
                    self._start(item, device=device)
            return _anything_left(self.runs)

    def holds(self) -> str:
        """Return why the rules of the queue let nothing start now."""
        rules = read_rules(self.runs)
        is_idle = rules.when != "idle" or self.is_idle()
        return rules.holds(now_s=self.clock(), is_idle=is_idle)

    def _follow(self, item: Item) -> None:
        """Update the file of a running item if its process, run folder or state changed."""
        child = self.children.get(item.id)
        current = _with_process(item, child) if child else item
        if current.pid is None and (process := _marked(self._mark(item))):
            current = replace(item, pid=process.pid, pid_started_s=process.create_time())
        code = child.process.poll() if child else None
        is_seen = not child and is_alive(pid=current.pid, started_s=current.pid_started_s)
        lives_on = code is None if child else is_seen
        if current.run is None:
            current = replace(current, run=_run_of(self.runs, current))
        if lives_on:
            if current != item:
                write(self.runs, current)
            return
        if child is not None and code is not None:
            last_words = last_line(
                item_file(self.runs, item.id, "log"), from_bytes=child.log_from_bytes
            )
            current = _exited(current, code, last_words=last_words)
        else:
            current = _ended_unseen(self.runs, current)
        ended = replace(current, ended_s=self.clock())
        write(self.runs, ended)
        self.children.pop(item.id, None)  # only now: a write that failed is tried again
        self.tell(ended)
        self.say(f"{item.id} {current.state}{f': {current.error}' if current.error else ''}")

    def _start(self, item: Item, *, device: str) -> None:
        begun = replace(item, state="running", started_s=self.clock(), device=device)
        # Written before the process starts: if the worker is killed in between, the training must not
        # start twice.
        write(self.runs, begun)
        try:
            child = self.spawn(begun)
        except (OSError, ValueError) as error:
            reason = one_line(f"cannot be started in {item.folder}: {error}")
            write(self.runs, replace(begun, state="failed", ended_s=self.clock(), error=reason))
            self.say(f"{item.id} failed: {reason}")
            return
        self.children[item.id] = child
        self.say(f"{item.id} started, process {child.process.pid}")
        write(self.runs, _with_process(begun, child))

    def spawn(self, item: Item) -> Child:
        """Start the trainer of an item; raises OSError, and ValueError for words no process accepts."""
        environment = environment_of(read_rules(self.runs), os.environ)
        environment[ITEM_VARIABLE] = self._mark(item)
        if item.device:
            environment[_DEVICES] = item.device
        with item_file(self.runs, item.id, "log").open("ab") as log:
            log_from_bytes = log.tell()
            process = subprocess.Popen(
                [*self.trainer, *item.argv],
                cwd=item.folder,
                env=environment,
                **detached(log),  # signals that end the worker do not reach it
            )
        # A child exists, alive or as a zombie, until it is waited for, so this cannot fail.
        started_s = psutil.Process(process.pid).create_time()
        return Child(process=process, started_s=started_s, log_from_bytes=log_from_bytes)

    def _mark(self, item: Item) -> str:
        return str(queue_folder(self.runs).absolute() / item.id)


def outside(runs: Path, running: Sequence[Item]) -> tuple[str, ...]:
    """Return the names of running trainings that no item of the queue started."""
    numbers = {item.pid for item in running}
    statuses = ((file.parent.name, read_status(file.parent)) for file in runs.glob(_STATUS_FILES))
    return tuple(
        name for name, status in statuses if status.state == "running" and status.pid not in numbers
    )


def _run_of(runs: Path, item: Item) -> str | None:
    """Return the run folder whose status an item's process wrote."""
    for file in runs.glob(_STATUS_FILES):
        if wrote_status(file.parent, pid=item.pid, started_s=item.pid_started_s):
            return file.parent.name
    return None


def _with_process(item: Item, child: Child) -> Item:
    return replace(item, pid=child.process.pid, pid_started_s=child.started_s)


def _marked(mark: str) -> psutil.Process | None:
    """Return the trainer with this mark: the oldest process, as its own children inherit the mark."""
    processes = [
        process
        for process in psutil.process_iter(["environ", "create_time"])
        if (process.info["environ"] or {}).get(ITEM_VARIABLE) == mark
    ]
    return min(processes, key=lambda process: process.info["create_time"], default=None)


def _exited(item: Item, code: int, *, last_words: str) -> Item:
    """Return the ended item from its trainer's exit code (negative: a signal) and last output line."""
    state: State = "failed"
    error = last_words or f"the trainer ended with exit code {code} and no message"
    if code == 0:
        state, error = "finished", ""
    elif code in INTERRUPTED_EXIT_CODES or -code in _ASKED_TO_END:
        state, error = "stopped", ""
    elif end := end_of(code):
        error = f"the trainer {end}"
        if was_killed(code):
            state = "interrupted"
            error += ": a user killed it, or the machine ran out of memory"
    return replace(item, state=state, exit_code=code, error=error)


def _ended_unseen(runs: Path, item: Item) -> Item:
    """Return the ended item from the last status its run wrote."""
    if _run_of(runs, item) == item.run is not None:
        status = read_status(runs / item.run)
        if status.state in ("finished", "stopped", "failed"):
            error = status.message if status.state == "failed" else ""
            return replace(item, state=status.state, exit_code=status.exit_code, error=error)
    error = "the trainer ended while no worker was running, without a final status"
    return replace(item, state="interrupted", error=error)


def last_line(log: Path, *, from_bytes: int = 0) -> str:
    """Return the last line of a log without its "error: ", empty if there is none."""
    try:
        with open_regular(log) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(from_bytes, end - _LOG_END_BYTES))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return one_line(lines[-1]).removeprefix("error: ") if lines else ""


POLL_S = 1.0
IDLE_POLLS = 10
IDLE_LOOKS = 30
_WORKER_FILE = ".worker.json"
_WORKER_LOCK = ".worker.lock"
_WORKER_LOG = ".worker.log"
_PREDECESSOR_WITHIN_S = 5.0
# Begins the lines that a worker says of its items; any other last line is why it died.
_OF_AN_ITEM = re.compile(r"\d+-\S+ ")
# Pause before a worker that died at its start is started again; else every page view would start one.
_NEXT_TRY_AFTER_S = 10.0


def ensure_worker(
    runs: Path, *, program: Sequence[str] = TRAINER, clock: Callable[[], float] = time.time
) -> None:
    """Start the worker in its own session if items are left and no worker lives.

    Raises MachineError if it cannot be started.
    """
    if worker_pid(runs) is not None or not _anything_left(runs):
        return
    log = queue_folder(runs) / _WORKER_LOG
    with changing(runs):
        last = _read_worker(runs)
        just_died = last is not None and last.pid_started_s > clock() - _NEXT_TRY_AFTER_S
        if just_died or worker_pid(runs) is not None:  # another page started one meanwhile
            return
        try:
            with log.open("wb") as output:
                words = [*program, "queue", "run", "--runs", str(runs.absolute())]
                # It outlives the page or terminal that started it.
                process = subprocess.Popen(words, **detached(output))
        except OSError as error:
            raise disk_error(log, error) from error
        _write_worker(runs, psutil.Process(process.pid))
    # Someone must wait for an ended child, or it stays a zombie as long as this process lives.
    threading.Thread(target=process.wait, name="lora-train-queue", daemon=True).start()


def worker_pid(runs: Path) -> int | None:
    """Return the process number of the queue's worker, None if none lives; never raises."""
    pid, started_s = _read_worker(runs) or (None, None)
    return pid if is_alive(pid=pid, started_s=started_s) else None


def worker_fault(runs: Path) -> str:
    """Return why the last worker died at its start, empty if it did not."""
    if _read_worker(runs) is None or worker_pid(runs) is not None:
        return ""
    line = last_line(queue_folder(runs) / _WORKER_LOG)
    return "" if _OF_AN_ITEM.match(line) else line or "it left no message"


def settle(runs: Path) -> None:
    """Record trainings that ended while no worker lived, without starting any; raises MachineError."""
    if worker_pid(runs) is None and any(item.state == "running" for item in items(runs)):
        with (
            suppress(RequestError),
            _only_worker(runs, within_s=0),
        ):  # a worker that just started does it
            Worker(runs=runs, slots=()).tick()


def work(
    runs: Path,
    *,
    trainer: Sequence[str] = TRAINER,
    devices: Sequence[str] | None = None,
    stop: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    idle_polls: int = IDLE_POLLS,
) -> None:
    """Work through the queue until it was empty for `idle_polls` polls, or `stop` returns a number.

    Trainings continue when the worker stops. Raises RequestError if the queue has a worker already.
    """
    # A retiring worker removes its record before it releases the lock: without a record, wait for the lock.
    within_s = _PREDECESSOR_WITHIN_S if worker_pid(runs) in (None, os.getpid()) else 0
    with _only_worker(runs, within_s=within_s) as lock_file:
        device_slots = slots(detect(), os.environ) if devices is None else devices
        worker = Worker(
            runs=runs,
            slots=device_slots,
            trainer=trainer,
            say=say,
            is_idle=Quiet().lasts,
            tell=partial(tell_by_notice, say=say),
        )
        idle, complaint = 0, ""
        # If the lock's file is gone, the user deleted the queue, and the lock keeps no other worker out.
        while stop() is None and lock_file.exists():
            try:
                # None, or that of a worker that waited for the lock in vain.
                if worker_pid(runs) != os.getpid():
                    _write_worker(runs, psutil.Process())
                idle = 0 if worker.tick() else idle + 1
                complaint = ""
            except MachineError as error:  # a full disk, say, which may have room later
                if str(error) != complaint:
                    say(complaint := str(error))
            if idle > idle_polls:
                with changing(runs):  # items that come now start a new worker
                    if not _anything_left(runs):
                        (lock_file.parent / _WORKER_FILE).unlink(missing_ok=True)
                        return
            sleep(POLL_S)


def tell_by_notice(item: Item, *, say: Callable[[str], None]) -> None:
    """Send the notices of an item that has ended by itself; what somebody stopped, somebody knows of."""
    notices = read_notices()
    if item.state == "stopped" or not notices.is_any:
        return
    took = duration_text((item.ended_s or 0.0) - (item.started_s or item.ended_s or 0.0))
    reason = f": {without_secrets(item.error)}" if item.error else ""
    notice = Notice(
        title=f"{item.label or item.id} {item.state}",
        message=f"The training {item.label or item.id} has {HAS[item.state]} after {took}{reason}",
        item=item.id,
        state=item.state,
        run=item.run or "",
    )

    def send_all() -> None:
        for line in send(notices, notice):
            say(f"{item.id} {line}")

    # A server that does not answer holds up no training; the worker ends after it.
    threading.Thread(target=send_all, name="lora-train-notice").start()


HAS = {
    "finished": "finished",
    "failed": "failed",
    "interrupted": "been interrupted",
}
"""What has become of an item that ended by itself, behind "has"."""


@dataclass(kw_only=True)
class Quiet:
    """For how many looks in a row nothing else has used the machine: a pause between two programs is none."""

    hardware: Callable[[], Hardware] = detect
    looks: int = 0

    def lasts(self) -> bool:
        """Look, and return whether the machine has been idle for a while."""
        found = self.hardware()
        is_quiet = load_factor(found, found.accelerator()[0]) == 1
        self.looks = self.looks + 1 if is_quiet else 0
        return self.looks >= IDLE_LOOKS


@contextmanager
def _only_worker(runs: Path, *, within_s: float) -> Iterator[Path]:
    """Hold the worker's lock while the block runs; yields the locked file.

    Raises RequestError if another worker still holds it after `within_s`.
    """
    file, pid = queue_folder(runs) / _WORKER_LOCK, worker_pid(runs)
    busy = RequestError(
        f"the queue in {file.parent} has a worker already{f', process {pid}' if pid else ''}",
        fix="no action needed: it starts all waiting trainings",
    )
    with locked(file, within_s=within_s, busy=busy):
        try:
            yield file
        finally:
            if worker_pid(runs) == os.getpid():
                (file.parent / _WORKER_FILE).unlink(missing_ok=True)


class _WorkerNote(NamedTuple):
    """The process of a worker and its start, written when it is started and by itself; one that ends removes it."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    pid_started_s: FiniteFloat


_WORKER = TypeAdapter(_WorkerNote)


def _read_worker(runs: Path) -> _WorkerNote | None:
    try:
        return _WORKER.validate_json(read_regular(queue_folder(runs) / _WORKER_FILE), strict=True)
    except (OSError, ValueError):  # none, or damaged: the next worker replaces it
        return None


def _write_worker(runs: Path, process: psutil.Process) -> None:
    record = _WorkerNote(process.pid, process.create_time())._asdict()
    write_atomic(queue_folder(runs) / _WORKER_FILE, json_bytes(record), durable=False)


def _anything_left(runs: Path) -> bool:
    return any(not item.has_ended for item in items(runs))
