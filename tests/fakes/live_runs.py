"""Run folders as they are while a run goes: cut at a step, with a status of a process that lives."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # the queue's trainer writes its status in 50 ms
    from tests.fakes.run_folder import FakeRun


def write_status(folder: Path, **fields: Any) -> None:
    """Write a status.json of this process at step 12 of 30, but for `fields`; it is whole whenever it is read."""
    process = psutil.Process()
    status: dict[str, Any] = {
        "state": "training",
        "pid": process.pid,
        "pid_started_s": process.create_time(),
        "name": folder.name,
        "step": 12,
        "steps": 30,
        "phase": "train",
        "done": 12,
        "total": 30,
        "message": "step 12 of 30, loss 0.1000",
        "heartbeat_s": time.time(),
        "left_s": 8.5,
        "left_from": "from the first 12 steps",
        "steps_here": 12,
        "exit_code": None,
    }
    unfinished = folder / "status.new"
    unfinished.write_text(json.dumps(status | fields), encoding="utf-8")
    unfinished.replace(folder / "status.json")


def until(run: FakeRun, step: int) -> Path:
    """Write the folder of a run as it is after `step`."""
    after = (index for index, row in enumerate(run.events) if row.get("step", 0) > step)
    run.events = run.events[: next(after, len(run.events))]
    run.events = [row for row in run.events if row["event"] != "finished"]
    return run.write()
