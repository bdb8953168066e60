"""The process that draws with LoRAs and keeps their base loaded for the next picture: how to ask it, what it keeps.

Inputs: jobs (jobs.py) with what is to be drawn. Outputs in `<runs>/.gui/drawing/`: `asked/ID`, an empty file for each
job that waits; `process.json`, the process and the base that it has loaded; in the folder of a job `far.json`, how far
it is. Like trainings it outlives these pages, so everything goes through files. It is started when something is to be
drawn and none runs, and ends by itself when nothing was drawn for `KEPT_S`, or while a training runs; a training that
starts ends it first where it needs the memory (hardware/kept_memory.py). What it was drawing then waits for the end of
that training, in a process that has nothing loaded, and goes on by itself.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import (
    disk_error,
    json_bytes,
    locked,
    read_json_object,
    write_atomic,
)
from lora_trainer.common.processes import detached, is_alive
from lora_trainer.hardware.kept_memory import Keeper, keeper, take_back

from .jobs import Job
from .workplace import Workplace

KEPT_S = 300.0
"""So long after its last picture the process keeps the base loaded."""
STOPPED, GAVE_WAY = 130, 143
"""Exit codes of a job that somebody stopped, and of one whose process was ended by what needs its memory."""
STOP_FILE, FAR_FILE = "stop", "far.json"
_LOCK_WITHIN_S = 10.0
_GROUND_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The files by which pages and the process talk."""

    root: Path

    @classmethod
    def of(cls, work: Workplace) -> Folder:
        """Return the folder of a workplace."""
        return cls(root=work.own / "drawing")

    @property
    def asked(self) -> Path:
        """With a file for each job that waits, by its id."""
        return self.root / "asked"

    @property
    def log(self) -> Path:
        """What the process and its libraries print."""
        return self.root / "log.txt"

    def changing(self) -> AbstractContextManager[None]:
        """Hold the list of what waits: nobody asks a process that is about to end."""
        busy = MachineError("another page asks for pictures", fix="try again in a moment")
        return locked(self.root / "lock", within_s=_LOCK_WITHIN_S, busy=busy)

    def living(self, *, within_s: float) -> AbstractContextManager[None]:
        """Be the one process that draws; raises MachineError where there is one for so long."""
        busy = MachineError("another process draws", fix="none is needed")
        return locked(self.root / "process.lock", within_s=within_s, busy=busy)

    def process(self) -> Mapping[str, Any] | None:
        """Return what the process that runs says of itself, None where none runs."""
        try:
            record = read_json_object(self.root / "process.json")
            runs = is_alive(pid=int(record["pid"]), started_s=float(record["started_s"]))
        except (RequestError, KeyError, TypeError, ValueError):
            return None
        return record if runs else None

    def tell(self, record: Mapping[str, Any]) -> None:
        """Write what the process says of itself; raises MachineError."""
        write_atomic(self.root / "process.json", json_bytes(record), durable=False)

    def leave(self) -> None:
        """Forget the process."""
        (self.root / "process.json").unlink(missing_ok=True)


def ask(work: Workplace, job: Job) -> None:
    """Have a job drawn, by a new process where none runs; raises MachineError."""
    folder = Folder.of(work)
    with folder.changing():
        try:
            folder.asked.mkdir(parents=True, exist_ok=True)
            (folder.asked / job.id).touch()
            if folder.process() is None:
                _begin(work, folder)
        except OSError as error:
            raise disk_error(folder.root, error) from error


def _begin(work: Workplace, folder: Folder) -> None:
    process = start_process(work, folder)
    threading.Thread(target=process.wait, daemon=True).start()  # it would stay as a zombie


def start_process(work: Workplace, folder: Folder, *after: str) -> subprocess.Popen[bytes]:
    """Start the process that draws; `after` are number and start of the one whose end it waits for first."""
    with folder.log.open("ab") if after else folder.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lora_trainer.gui.drawing_process", str(work.runs), *after],
            **detached(log),  # a Ctrl-C meant for the interface does not reach it
        )


def stop(job: Job) -> None:
    """Ask for no more pictures of a job; the base stays loaded."""
    try:
        (job.folder / STOP_FILE).touch()
    except OSError as error:
        raise disk_error(job.folder, error) from error


@dataclass(frozen=True, kw_only=True)
class Far:
    """How far a job is: its whole pictures, the steps done of the one that is being drawn, seconds since the first."""

    pictures: int
    step: int
    steps: int
    seconds: float

    def left_s(self, count: int) -> float:
        """Return the seconds that the rest of `count` pictures takes at this pace; NaN where too little is drawn."""
        done = self.pictures + self.step / self.steps
        # The first steps of a picture take as long as several later ones.
        has_ground = self.pictures > 0 or self.step >= min(_GROUND_STEPS, self.steps / 2)
        return self.seconds / done * max(0.0, count - done) if done and has_ground else math.nan


def far(job: Job) -> Far | None:
    """Return how far a job is, None before its first pass."""
    try:
        record = read_json_object(job.folder / FAR_FILE)
        pictures, step, steps = (int(record[name]) for name in ("pictures", "step", "steps"))
        seconds = float(record["seconds"])
    except (RequestError, KeyError, TypeError, ValueError):
        return None
    return Far(pictures=pictures, step=step, steps=steps, seconds=seconds) if steps > 0 else None


def loaded(work: Workplace) -> tuple[str, Keeper] | None:
    """Return the base that is loaded now and the process that keeps it, None for none."""
    record, found = Folder.of(work).process(), keeper()
    if record is None or found is None or found.pid != record["pid"] or not record.get("base"):
        return None
    return str(record["base"]), found


def waits(work: Workplace) -> int | None:
    """Return the number of the process whose end is waited for before the drawing goes on; None where it draws."""
    record = Folder.of(work).process()
    found = None if record is None else record.get("waits_for")
    return found if isinstance(found, int) else None


def give_back() -> None:
    """End the process and have its memory free."""
    take_back(is_told=False)
