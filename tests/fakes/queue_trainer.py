"""A trainer for the queue's tests: starts in 50 ms, writes status.json as one does, ends as it is told.

Its first word is JSON: `name` of the run (none: it writes no status), `state` it ends in, `exit` code,
`say` its last line, `until` a file that it waits for. What it was given is written to `given.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def main(words: list[str]) -> int:
    """Do what the first word says; return the exit code."""
    orders = {"state": "finished", "exit": 0, "say": "", **json.loads(words[0])}
    run = Path("runs", orders["name"]) if "name" in orders else None
    if run is not None:
        run.mkdir(parents=True, exist_ok=True)
        given = {"words": words[1:], "device": os.environ.get("CUDA_VISIBLE_DEVICES")}
        replace(run / "given.json", given)
        status(run, state="training", code=None, say="")
    while "until" in orders and not Path(orders["until"]).exists():
        time.sleep(0.005)
    if run is not None:
        status(run, state=orders["state"], code=orders["exit"], say=orders["say"])
    sys.stderr.write(f"step 1\n{orders['say']}\n")
    return int(orders["exit"])


def status(run: Path, *, state: str, code: int | None, say: str) -> None:
    process = psutil.Process()
    content = {
        "state": state,
        "pid": process.pid,
        "pid_started_s": process.create_time(),
        "name": run.name,
        "step": 1,
        "steps": 4,
        "message": say,
        "heartbeat_s": time.time(),
        "exit_code": code,
    }
    replace(run / "status.json", content)


def replace(file: Path, content: dict[str, Any]) -> None:
    """Write a file that is whole whenever it is read."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
