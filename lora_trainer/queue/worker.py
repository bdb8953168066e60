"""What works through the training queue: starts what waits, one a device, and notes how it ended.

Inputs: the items of a runs folder, the devices. Outputs: trainers in sessions of their own, which
outlive whoever started them, and item files that say what became of each. A trainer is known by its
process number and start, so that the next worker finds again what the last one left running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from lora_trainer.common.detached import detached, end_of, was_killed
from lora_trainer.common.wording import INTERRUPTED_EXIT_CODES, one_line
from lora_trainer.hardware.machine import Hardware
from lora_trainer.queue.items import (
    Item,
    State,
    changing,
    in_order,
    items,
    log_file,
    queue_folder,
    write,
)
from lora_trainer.reporting.status import STATUS_FILE, is_alive, read_status, wrote_status

TRAINER = (sys.executable, "-m", "lora_trainer")
_MARK = "LORA_TRAIN_QUEUE_ITEM"
"""Variable in a trainer's environment that names its item: it is there before its number is written."""
_DEVICES = "CUDA_VISIBLE_DEVICES"
_LOG_END_BYTES = 4096
_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


def slots(hardware: Hardware, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES for each training that can run at once, "" to leave it alone."""
    if hardware.accelerator().value is None or len(hardware.gpus) == 1:
        return ("",)
    chosen = environment.get(_DEVICES)
    if chosen is not None:  # its words, in the order in which the cards were found by them
        words = [word.strip() for word in chosen.split(",")]
        return tuple(words[gpu.index] for gpu in hardware.gpus)
    return tuple(gpu.uuid or str(gpu.index) for gpu in hardware.gpus)


@dataclass(frozen=True, kw_only=True)
class Child:
    """A trainer that this worker started; its words begin at `log_from_bytes` of the item's log."""

    process: subprocess.Popen[bytes]
    started_s: float
    log_from_bytes: int


@dataclass(kw_only=True)
class Worker:
    """Follows and starts the trainings of one queue; `trainer` is what their words are given to."""

    runs: Path
    slots: Sequence[str]
    trainer: Sequence[str] = TRAINER
    clock: Callable[[], float] = time.time
    say: Callable[[str], None] = lambda _: None
    children: dict[str, Child] = field(default_factory=dict)

    def tick(self) -> bool:
        """Note what has ended, start what there is room for; return whether anything is left.

        Raises MachineError when the disk refuses; nothing is lost then, the next tick does the rest.
        """
        with changing(self.runs):
            for item in items(self.runs):
                if item.state == "running":
                    self._follow(item)
            for item, device in zip(in_order(items(self.runs)), self._free_slots(), strict=False):
                self._start(item, device=device)
            return any(not item.has_ended for item in items(self.runs))

    def _follow(self, item: Item) -> None:
        """Write down what has become of a running item, where that is news."""
        child = self.children.get(item.id)
        known = self._identified(item, child)
        code = child.process.poll() if child else None
        lives_on = code is None if child else _lives(known)
        if known.run is None:
            known = replace(known, run=_run_of(self.runs, known))
        if lives_on:
            if known != item:
                write(self.runs, known)
            return
        if child is not None and code is not None:
            said = last_line(log_file(self.runs, item.id), from_bytes=child.log_from_bytes)
            known = _exited(known, code, said=said)
        else:
            known = _ended_unseen(self.runs, known)
        write(self.runs, replace(known, ended_s=self.clock()))
        self.children.pop(item.id, None)  # only now: a write that failed is tried again
        self.say(f"{item.id} {known.state}{f': {known.error}' if known.error else ''}")

    def _identified(self, item: Item, child: Child | None) -> Item:
        """Return the item with its process: also when a worker was killed before it wrote it down."""
        if item.pid is not None:
            return item
        if child is not None:
            return _with_process(item, child)
        left = _marked(self._mark(item))
        if left is None:
            return item
        return replace(item, pid=left.pid, pid_started_s=left.create_time())

    def _free_slots(self) -> Sequence[str]:
        """Return the devices for what waits.

        A training that somebody started by hand takes one; it is not known which, by itself the first.
        """
        present = items(self.runs)
        if not in_order(present):
            return ()
        running = [item for item in present if item.state == "running"]
        free = [slot for slot in self.slots if slot not in {item.device for item in running}]
        room = len(self.slots) - len(running) - len(outside(self.runs, running))
        return free[-room:] if room > 0 else ()

    def _start(self, item: Item, *, device: str) -> None:
        begun = replace(item, state="running", started_s=self.clock(), device=device)
        # Before the process: a worker that is killed here must not leave a training that starts twice.
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
        """Start the trainer of an item; raises OSError, and ValueError for words no process takes."""
        environment = {**os.environ, _MARK: self._mark(item)}
        if item.device:
            environment[_DEVICES] = item.device
        with log_file(self.runs, item.id).open("ab") as log:
            log_from_bytes = log.tell()
            process = subprocess.Popen(
                [*self.trainer, *item.argv],
                cwd=item.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **detached(),  # what ends the worker does not reach it
            )
        # It is there, alive or dead, until it is waited for.
        started_s = psutil.Process(process.pid).create_time()
        return Child(process=process, started_s=started_s, log_from_bytes=log_from_bytes)

    def _mark(self, item: Item) -> str:
        return str(queue_folder(self.runs).absolute() / item.id)


def outside(runs: Path, running: Sequence[Item]) -> tuple[str, ...]:
    """Return the names of the runs that train here although no item started them."""
    numbers = {item.pid for item in running}
    found = ((file.parent.name, read_status(file.parent)) for file in _status_files(runs))
    return tuple(
        name for name, seen in found if seen.state == "running" and seen.pid not in numbers
    )


def _status_files(runs: Path) -> Iterator[Path]:
    return runs.glob(f"*/{STATUS_FILE}")


def _run_of(runs: Path, item: Item) -> str | None:
    """Return the run folder whose status an item's process wrote."""
    if item.pid is None or item.pid_started_s is None:
        return None
    for file in _status_files(runs):
        if wrote_status(file.parent, pid=item.pid, started_s=item.pid_started_s):
            return file.parent.name
    return None


def _with_process(item: Item, child: Child) -> Item:
    return replace(item, pid=child.process.pid, pid_started_s=child.started_s)


def _lives(item: Item) -> bool:
    if item.pid is None or item.pid_started_s is None:
        return False
    return is_alive(pid=item.pid, started_s=item.pid_started_s)


def _marked(mark: str) -> psutil.Process | None:
    """Return the trainer that was started with this mark; its own helpers inherit it and are younger."""
    found = [
        process
        for process in psutil.process_iter(["environ", "create_time"])
        if (process.info["environ"] or {}).get(_MARK) == mark
    ]
    return min(found, key=lambda process: process.info["create_time"], default=None)


def _exited(item: Item, code: int, *, said: str) -> Item:
    """Return how an item ended by its trainer's exit code, negative for a signal, and last words."""
    state: State = "failed"
    error = said or f"the trainer ended with exit code {code} and said nothing"
    if code == 0:
        state, error = "finished", ""
    elif code in INTERRUPTED_EXIT_CODES or -code in _ASKED_TO_END:
        state, error = "stopped", ""
    elif end := end_of(code):
        state, error = "failed", f"the trainer {end}"
        if was_killed(code):
            state = "interrupted"
            error += ": somebody killed it, or the machine ran out of memory"
    return replace(item, state=state, exit_code=code, error=error)


def _ended_unseen(runs: Path, item: Item) -> Item:
    """Return how an item ended by what its run wrote last."""
    if _run_of(runs, item) == item.run is not None:
        seen = read_status(runs / item.run)
        if seen.state in ("finished", "stopped", "failed"):
            error = seen.message if seen.state == "failed" else ""
            return replace(item, state=seen.state, exit_code=seen.exit_code, error=error)
    error = "the trainer ended while nobody watched, and did not say how"
    return replace(item, state="interrupted", error=error)


def last_line(log: Path, *, from_bytes: int = 0) -> str:
    """Return the last line of a log, without what marks it as an error; empty where there is none."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(from_bytes, end - _LOG_END_BYTES))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return one_line(lines[-1]).removeprefix("error: ") if lines else ""
