"""Runs the command of one job folder and writes down how it ended (see jobs.py).

Input: the folder, with job.json. Outputs in it: runner.json (the process that runs it, as psutil
knows it), log.txt, result.json. A SIGTERM is handed on to the command.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from lora_trainer.common.files import json_bytes, read_json_object, write_atomic

from .jobs import JOB_FILE, LOG_FILE, RESULT_FILE, RUNNER_FILE


def main(folder: Path) -> None:
    """Run the command to its end."""
    asked: list[int] = []  # to end, before there is a command to hand it on to
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    me = psutil.Process()
    runner = {"pid": me.pid, "started_s": me.create_time()}
    write_atomic(folder / RUNNER_FILE, json_bytes(runner), durable=False)
    argv = [str(word) for word in read_json_object(folder / JOB_FILE)["argv"]]
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if asked:
            process.terminate()
        exit_code = process.wait()
    write_atomic(folder / RESULT_FILE, json_bytes({"exit_code": exit_code}), durable=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
