"""The worker of a training queue as a process: one a queue, started where it is missed, gone when idle.

Inputs: the runs folder. Outputs: `.worker.lock`, held by the one that works, `.worker.json`, which
process that is, `.worker.log`, what it said. It may be killed at any time: trainings go on, and the
next worker finds them.
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

from lora_trainer.common.detached import detached
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, write_atomic
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
"""A worker that dies before it works would else be started by every look at a page."""


def ensure_worker(
    runs: Path, *, program: Sequence[str] = TRAINER, clock: Callable[[], float] = time.time
) -> None:
    """Start the worker in a session of its own where something is left to do and none lives.

    Raises MachineError when it cannot be started.
    """
    if worker_pid(runs) is not None or not _anything_left(runs):
        return
    log = queue_folder(runs) / _WORKER_LOG
    with changing(runs):
        last = _read_worker(runs)
        if last is not None and (
            last.is_alive or last.failed_after_s > clock() - _NEXT_TRY_AFTER_S
        ):
            return  # another page was faster, or the last one died at once
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*program, "queue", "run", "--runs", str(runs.absolute())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    **detached(),  # it outlives the page or terminal that wanted it
                )
        except OSError as error:
            raise disk_error(log, error) from error
        _write_worker(runs, psutil.Process(process.pid), started_s=clock())
    # Else it would stay a zombie, as long as this process lives, once it has ended.
    threading.Thread(target=process.wait, name="lora-train-queue", daemon=True).start()


def worker_pid(runs: Path) -> int | None:
    """Return the process number of the queue's worker, None where none lives; never raises."""
    found = _read_worker(runs)
    return found.pid if found is not None and found.is_alive else None


def worker_fault(runs: Path) -> str:
    """Return why the last worker died before it worked, an empty text where it did not."""
    found = _read_worker(runs)
    if found is None or found.is_alive or found.works:
        return ""
    return last_line(queue_folder(runs) / _WORKER_LOG) or "it said nothing"


def settle(runs: Path) -> None:
    """Note what ended while no worker lived, and start nothing; raises MachineError."""
    if worker_pid(runs) is None and any(item.state == "running" for item in items(runs)):
        with suppress(RequestError), _only_worker(runs, within_s=0):  # else one lives after all
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
    """Work through the queue until nothing was left for `idle_polls` polls, or `stop` says a number.

    Trainings go on when the worker stops. Raises RequestError when the queue has a worker.
    """
    # One that retires says so before it lets go: then it is waited for.
    within_s = _PREDECESSOR_WITHIN_S if worker_pid(runs) in (None, os.getpid()) else 0
    with _only_worker(runs, within_s=within_s) as lock_file:
        found = slots(detect(), os.environ) if devices is None else devices
        worker = Worker(runs=runs, slots=found, trainer=trainer, say=say)
        idle, complaint = 0, ""
        # Without its file the lock keeps nobody out: somebody has deleted the queue.
        while stop() is None and lock_file.exists():
            try:
                _announce_worker(runs)
                idle = 0 if worker.tick() else idle + 1
                complaint = ""
            except MachineError as error:  # such as a full disk: it may have room later
                if str(error) != complaint:
                    say(complaint := str(error))
            if idle > idle_polls and _retired(runs):
                return
            sleep(POLL_S)


@contextmanager
def _only_worker(runs: Path, *, within_s: float) -> Iterator[Path]:
    """Be the queue's worker while the block runs; yields the locked file.

    Raises RequestError when another one still is after `within_s`.
    """
    file = queue_folder(runs) / _WORKER_LOCK
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=within_s)
    except Timeout:
        raise RequestError(
            f"the queue in {file.parent} has a worker already, process {worker_pid(runs)}",
            fix="let that one work; it starts whatever waits",
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
    """What is written of a worker: by who started it, and `works` once it does by itself."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    pid_started_s: FiniteFloat
    started_s: FiniteFloat
    works: bool

    @property
    def is_alive(self) -> bool:
        return is_alive(pid=self.pid, started_s=self.pid_started_s)

    @property
    def failed_after_s(self) -> float:
        """When one was started that never worked; a worker that was killed is no such failure."""
        return float("-inf") if self.works else self.started_s


_WORKER = TypeAdapter(_WorkerRecord)


def _read_worker(runs: Path) -> _WorkerRecord | None:
    try:
        return _WORKER.validate_json((queue_folder(runs) / _WORKER_FILE).read_bytes(), strict=True)
    except (OSError, ValueError):  # none, or damaged: the next worker replaces it
        return None


def _announce_worker(runs: Path) -> None:
    """Write down that this process works; one that waits for the lock in vain is written down too."""
    found = _read_worker(runs)
    if found is None or not found.works or found.pid != os.getpid() or not found.is_alive:
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
    """Say that this worker is gone, unless something came; whoever adds later starts another one."""
    with changing(runs):
        if _anything_left(runs):
            return False
        (queue_folder(runs) / _WORKER_FILE).unlink(missing_ok=True)
        return True


def _anything_left(runs: Path) -> bool:
    return any(not item.has_ended for item in items(runs))
