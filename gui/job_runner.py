"""Runs the command of one job folder and writes down how it ended (see jobs.py).

Input: the folder, with job.json. Outputs in it: runner.json (the process that runs it, as psutil
knows it), log.txt, result.json. A SIGTERM is handed on to the command.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from lora_trainer.common.files import read_json_object

from .jobs import JOB_FILE, LOG_FILE, end, take


def main(folder: Path) -> None:
    """Run the command to its end."""
    asked: list[int] = []  # to end, before there is a command to hand it on to
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    take(folder)
    argv = [str(word) for word in read_json_object(folder / JOB_FILE)["argv"]]
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if asked:
            process.terminate()
        exit_code = process.wait()
    end(folder, exit_code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
