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

from live_runs import write_status  # this script runs by itself: its folder is on the path


def main(words: list[str]) -> int:
    """Do what the first word says; return the exit code."""
    orders = {"state": "finished", "exit": 0, "say": "", **json.loads(words[0])}
    run = Path("runs", orders["name"]) if "name" in orders else None
    if run is not None:
        run.mkdir(parents=True, exist_ok=True)
        given = {"words": words[1:], "device": os.environ.get("CUDA_VISIBLE_DEVICES")}
        given["is_offline"] = os.environ.get("HF_HUB_OFFLINE") == "1"
        (run / "given.json").write_text(json.dumps(given), encoding="utf-8")
        write_status(run)
    while "until" in orders and not Path(orders["until"]).exists():
        time.sleep(0.005)
    if run is not None:
        end = {"exit_code": orders["exit"], "message": orders["say"]}
        write_status(run, state=orders["state"], **end)
    sys.stderr.write(f"step 1\n{orders['say']}\n")
    return int(orders["exit"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
