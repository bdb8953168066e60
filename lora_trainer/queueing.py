"""The training queue as people use it: add, move, remove, start again; and the worker's life.

Inputs: the runs folder and the words of a training's command line. Outputs: items in `<runs>/.queue/`
(`queue_files.py`) and one worker a queue (`queue_worker.py`), a process of its own that ends when
nothing is left. Everything is a function of files: a worker, or what started it, may die at any time.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lora_trainer.errors import MachineError, RequestError
from lora_trainer.files import disk_error, json_bytes, write_atomic
from lora_trainer.hardware import detect
from lora_trainer.output.status import lives
from lora_trainer.output.wording import one_line
from lora_trainer.queue_files import Item as Item
from lora_trainer.queue_files import (
    changing,
    in_order,
    item_file,
    new_id,
    queue_folder,
    write,
)
from lora_trainer.queue_files import items as items
from lora_trainer.queue_files import log_file as log_file
from lora_trainer.queue_worker import TRAINER, Worker, slots
from lora_trainer.queue_worker import outside as outside

POLL_S = 1.0
IDLE_POLLS = 10
_LABEL_MAX_LENGTH = 200
_WORKER_FILE = ".worker.json"
_WORKER_LOCK = ".worker.lock"
_WORKER_LOG = ".worker.log"
_PREDECESSOR_WITHIN_S = 5.0


def add(
    runs: Path,
    argv: Sequence[str],
    *,
    label: str,
    folder: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Item:
    """Put a training behind all that wait; `argv` is what follows `lora-train`, `folder` its place.

    Raises RequestError for a command that waits or runs already (a double click, a second tab) or
    that no process can be given, MachineError when the disk refuses.
    """
    words, where = tuple(argv), str((folder or Path.cwd()).absolute())
    for word in (*words, where, label):
        _refuse_unspeakable(word)
    with changing(runs):
        present = items(runs)
        for twin in present:
            if not twin.has_ended and (twin.argv, twin.folder) == (words, where):
                raise RequestError(
                    f"this training is in the queue already: {twin.id}, {twin.state}",
                    fix="wait for it, or change something, such as its name",
                )
        shown = one_line(label)[:_LABEL_MAX_LENGTH]
        item = Item(
            id=new_id(runs, label=shown),
            order=_last_place(present),
            argv=words,
            folder=where,
            label=shown,
            added_s=clock(),
        )
        write(runs, item)
        return item


def again(runs: Path, id: str) -> Item:
    """Let an item that has ended wait once more; one that ended early goes on with its run.

    Raises RequestError for an item that has not ended or whose file is damaged, and MachineError.
    """
    with changing(runs):
        present = items(runs)
        item = _chosen(present, id)
        if not item.has_ended:
            raise RequestError(f"{id} is {item.state} already", fix="wait for it")
        if not item.argv:
            raise RequestError(
                f"{id} cannot be started: {item.error}", fix="remove it and add the training again"
            )
        item = Item(
            id=item.id,
            order=_last_place(present),
            argv=_going_on(runs, item),
            folder=item.folder,
            label=item.label,
            added_s=item.added_s,
        )
        write(runs, item)
        return item


def move(runs: Path, id: str, *, by: int) -> None:
    """Let a waiting item change places: -1 is one earlier, +1 one later; at an end it stays.

    Raises RequestError for an item that does not wait, MachineError when the disk refuses.
    """
    with changing(runs):
        present = items(runs)
        item = _chosen(present, id)
        if item.state != "waiting":
            raise RequestError(f"{id} is {item.state}", fix="move one that waits")
        waiting = in_order(present)
        place = waiting.index(item)
        waiting.insert(min(max(place + by, 0), len(waiting) - 1), waiting.pop(place))
        # Two files cannot change at once: a crash in between leaves an order, if not this one.
        for order, other in enumerate(waiting, start=1):
            if other.order != order:
                write(runs, replace(other, order=order))


def remove(runs: Path, id: str) -> None:
    """Forget an item that waits or has ended, and its log; its run folder stays.

    Raises RequestError for one that runs, MachineError when the disk refuses.
    """
    with changing(runs):
        item = _chosen(items(runs), id)
        if item.state == "running":
            raise RequestError(f"{id} is running", fix="stop its training first, then remove it")
        file = item_file(runs, id)
        try:
            file.unlink()
            log_file(runs, id).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error


def ensure_worker(runs: Path, *, program: Sequence[str] = TRAINER) -> None:
    """Start the worker in a session of its own where something is left to do and none lives.

    Raises MachineError when it cannot be started.
    """
    if worker_pid(runs) is not None or not _anything_left(runs):
        return
    log = queue_folder(runs) / _WORKER_LOG
    with changing(runs):
        if worker_pid(runs) is not None:  # another page was faster
            return
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*program, "queue", "run", "--runs", str(runs.absolute())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # it outlives the page or terminal that wanted it
                )
        except OSError as error:
            raise disk_error(log, error) from error
        _write_worker(runs, psutil.Process(process.pid))
    # Else it would stay a zombie, as long as this process lives, once it has ended.
    threading.Thread(target=process.wait, name="lora-train-queue", daemon=True).start()


def worker_pid(runs: Path) -> int | None:
    """Return the process number of the queue's worker, None where none lives; never raises."""
    try:
        found = json.loads((queue_folder(runs) / _WORKER_FILE).read_bytes())
        pid = int(found["pid"])
        return pid if lives(pid=pid, started_s=float(found["pid_started_s"])) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


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


def _announce_worker(runs: Path) -> None:
    """Write down that this process is the worker; one that waited for the lock in vain may have, too."""
    if worker_pid(runs) != os.getpid():
        _write_worker(runs, psutil.Process())


def _write_worker(runs: Path, process: psutil.Process) -> None:
    record = {"pid": process.pid, "pid_started_s": process.create_time()}
    write_atomic(queue_folder(runs) / _WORKER_FILE, json_bytes(record), durable=False)


def _retired(runs: Path) -> bool:
    """Say that this worker is gone, unless something came; whoever adds later starts another one."""
    with changing(runs):
        if _anything_left(runs):
            return False
        (queue_folder(runs) / _WORKER_FILE).unlink(missing_ok=True)
        return True


def _anything_left(runs: Path) -> bool:
    return any(not item.has_ended for item in items(runs))


def _last_place(present: Sequence[Item]) -> int:
    return 1 + max((item.order for item in present if item.state == "waiting"), default=0)


def _chosen(present: Sequence[Item], id: str) -> Item:
    """Return the item of that name; only what is listed can be named, so no name leads elsewhere."""
    for item in present:
        if item.id == id:
            return item
    raise RequestError(
        f"there is no item {id!r} in the queue", fix="`lora-train queue list` names them"
    )


def _going_on(runs: Path, item: Item) -> tuple[str, ...]:
    """Return the command that goes on with an item's run where it ended early, else its own."""
    resumes = any(word.startswith("--resume") for word in item.argv)
    if item.state == "finished" or item.run is None or resumes:
        return item.argv
    run = (runs / item.run).absolute()
    return ("--resume-from", str(run), *item.argv) if run.is_dir() else item.argv


def _refuse_unspeakable(word: str) -> None:
    try:
        speakable = b"\0" not in word.encode()
    except UnicodeEncodeError:
        speakable = False
    if not speakable:
        raise RequestError(
            f"{ascii(word)} cannot be a word of a command", fix="use ordinary characters"
        )
