"""The worker process of a training queue: one for each queue, started when needed, ends when idle.

Inputs: the runs folder. Outputs: `.worker.lock`, held by the worker; `.worker.json`, its process;
`.worker.log`, its output. It may be killed at any time: trainings continue, and the next worker finds them.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
from filelock import FileLock, Timeout
from pydantic import Field, FiniteFloat, TypeAdapter

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, write_atomic
from lora_trainer.common.processes import detached
from lora_trainer.hardware.machine import detect
from lora_trainer.queue.items import changing, items, queue_folder
from lora_trainer.queue.worker import TRAINER, Worker, last_line, slots
from lora_trainer.reporting.status import is_alive

POLL_S = 1.0
IDLE_POLLS = 10
_WORKER_FILE = ".worker.json"
_WORKER_LOCK = ".worker.lock"
_WORKER_LOG = ".worker.log"
_PREDECESSOR_WITHIN_S = 5.0
_NEXT_TRY_AFTER_S = 10.0
"""Pause before a worker that died at its start is started again; else every page view would start one."""


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
        if last is not None and (
            last.is_alive or last.failed_after_s > clock() - _NEXT_TRY_AFTER_S
        ):
            return  # another page started one meanwhile, or the last one died at its start
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*program, "queue", "run", "--runs", str(runs.absolute())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    **detached(),  # it outlives the page or terminal that started it
                )
        except OSError as error:
            raise disk_error(log, error) from error
        _write_worker(runs, psutil.Process(process.pid), started_s=clock())
    # Someone must wait for an ended child, or it stays a zombie as long as this process lives.
    threading.Thread(target=process.wait, name="lora-train-queue", daemon=True).start()


def worker_pid(runs: Path) -> int | None:
    """Return the process number of the queue's worker, None if none lives; never raises."""
    record = _read_worker(runs)
    return record.pid if record is not None and record.is_alive else None


def worker_fault(runs: Path) -> str:
    """Return why the last worker died at its start, empty if it did not."""
    record = _read_worker(runs)
    if record is None or record.is_alive or record.works:
        return ""
    return last_line(queue_folder(runs) / _WORKER_LOG) or "it left no message"


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
        worker = Worker(runs=runs, slots=device_slots, trainer=trainer, say=say)
        idle, complaint = 0, ""
        # If the lock's file is gone, the user deleted the queue, and the lock keeps no other worker out.
        while stop() is None and lock_file.exists():
            try:
                _announce_worker(runs)
                idle = 0 if worker.tick() else idle + 1
                complaint = ""
            except MachineError as error:  # a full disk, say, which may have room later
                if str(error) != complaint:
                    say(complaint := str(error))
            if idle > idle_polls and _retired(runs):
                return
            sleep(POLL_S)


@contextmanager
def _only_worker(runs: Path, *, within_s: float) -> Iterator[Path]:
    """Hold the worker's lock while the block runs; yields the locked file.

    Raises RequestError if another worker still holds it after `within_s`.
    """
    file = queue_folder(runs) / _WORKER_LOCK
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=within_s)
    except Timeout:
        raise RequestError(
            f"the queue in {file.parent} has a worker already, process {worker_pid(runs)}",
            fix="no action needed: it starts all waiting trainings",
        ) from None
    except OSError as error:
        raise disk_error(file, error) from error
    try:
        yield file
    finally:
        if worker_pid(runs) == os.getpid():
            (file.parent / _WORKER_FILE).unlink(missing_ok=True)
        lock.release()


@dataclass(frozen=True, kw_only=True)
class _WorkerRecord:
    """Record of a worker: written by the process that starts it, then with `works` by the worker itself."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    pid_started_s: FiniteFloat
    started_s: FiniteFloat
    works: bool

    @property
    def is_alive(self) -> bool:
        return is_alive(pid=self.pid, started_s=self.pid_started_s)

    @property
    def failed_after_s(self) -> float:
        """Start time of a worker that never reached its work, else minus infinity."""
        return float("-inf") if self.works else self.started_s


_WORKER = TypeAdapter(_WorkerRecord)


def _read_worker(runs: Path) -> _WorkerRecord | None:
    try:
        return _WORKER.validate_json((queue_folder(runs) / _WORKER_FILE).read_bytes(), strict=True)
    except (OSError, ValueError):  # none, or damaged: the next worker replaces it
        return None


def _announce_worker(runs: Path) -> None:
    """Write this process into the record, which may hold another that waited for the lock in vain."""
    record = _read_worker(runs)
    if record is None or not record.works or record.pid != os.getpid() or not record.is_alive:
        _write_worker(runs, psutil.Process(), started_s=time.time(), works=True)


def _write_worker(
    runs: Path, process: psutil.Process, *, started_s: float, works: bool = False
) -> None:
    record = _WorkerRecord(
        pid=process.pid,
        pid_started_s=process.create_time(),
        started_s=started_s,
        works=works,
    )
    file = queue_folder(runs) / _WORKER_FILE
    write_atomic(file, json_bytes(asdict(record)), durable=False)


def _retired(runs: Path) -> bool:
    """Remove this worker's record and return True, or False if items came; a later `add` starts a new worker."""
    with changing(runs):
        if _anything_left(runs):
            return False
        (queue_folder(runs) / _WORKER_FILE).unlink(missing_ok=True)
        return True


def _anything_left(runs: Path) -> bool:
    return any(not item.has_ended for item in items(runs))
