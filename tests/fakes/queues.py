"""A training queue in a test: its folder, the fake trainer, workers here and in other processes.

A `Place` is removed with what runs in it: processes that a failed test leaves behind are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_trainer.queue import commands, worker
from tests.fakes.runs import ROOT

FAKE_TRAINER = (sys.executable, str(ROOT / "tests" / "fakes" / "queue_trainer.py"))
WITHIN_S = 250.0
"""A loaded machine is not a failure; a condition that never comes is one."""
_WORKER = """
import sys
from pathlib import Path
from lora_trainer.queue import worker
*trainer, _, _, _, runs = sys.argv[1:]
worker.POLL_S = 0.05
worker.work(Path(runs), trainer=trainer, devices=[""], idle_polls=20)
"""
WORKER_PROGRAM = (sys.executable, "-c", _WORKER, *FAKE_TRAINER)
"""Stands in for `lora-train`: whatever command it gets, it is a worker with the fake trainer."""


def until(condition: Callable[[], object], *, what: str = "") -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, f"never came: {what or condition}"
        time.sleep(0.005)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the queue of a test is; trainings start in `folder`, their runs are in `folder`/runs."""

    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def add(self, name: str, *words: str, **orders: Any) -> commands.Item:
        """Queue a fake training of that name."""
        first = json.dumps({"name": name, **orders})
        return commands.add(self.runs, [first, *words], label=name, folder=self.folder)

    def become(self, item: commands.Item, **changes: Any) -> commands.Item:
        """Let an item be what a worker would make of it."""
        changed = replace(item, **changes)
        with commands.changing(self.runs):
            commands.write(self.runs, changed)
        return changed

    def worker(self, *slots: str) -> worker.Worker:
        """Return a worker of this process with the fake trainer."""
        return worker.Worker(runs=self.runs, slots=slots or ("",), trainer=FAKE_TRAINER)

    def worker_process(self) -> subprocess.Popen[bytes]:
        """Start a worker in a process of its own."""
        command = [*WORKER_PROGRAM, "queue", "run", "--runs", str(self.runs)]
        return subprocess.Popen(command, start_new_session=True)

    def item(self, id: str) -> commands.Item:
        return next(item for item in commands.items(self.runs) if item.id == id)

    def states(self) -> dict[str, str]:
        """Return the state of each item by its label, as listed."""
        return {item.label: item.state for item in commands.items(self.runs)}

    def let(self, name: str) -> Path:
        """Return the file that a training told `until` it waits for."""
        return self.folder / f"let-{name}"

    def given(self, name: str) -> dict[str, Any]:
        """Return what the trainer of a run was given."""
        value: dict[str, Any] = json.loads((self.runs / name / "given.json").read_bytes())
        return value

    def finish(self, worker: worker.Worker) -> None:
        """Let a worker work until nothing is left."""
        until(lambda: not worker.tick(), what="the end of the queue")

    def clean_up(self) -> None:
        """Kill what still runs."""
        pids = [item.pid for item in commands.items(self.runs) if item.state == "running"]
        for pid in (*pids, worker.worker_pid(self.runs)):
            if pid is not None and pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
