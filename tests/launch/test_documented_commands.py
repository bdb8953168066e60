"""The commands of docs/many-gpus.md, as they are written there, on the embedded base with its defaults.

TensorBoard (the extra `log`), samples, validation, saves, the report: what a user gets. That several processes do the
training that one does is in tests/test_processes.py. Its samples are of one prompt and have two steps, and what was
learned is not measured at its end, which is quicker.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lora_trainer.common.events import read_jsonl
from lora_trainer.reporting.run_record import read as read_record
from tests.fakes.runs import ROOT, code_of_fork, events, speak_into

STEPS = 8
QUICKER = "--set sampling.steps=2 --set 'sampling.prompts=[\"a zibbo\"]' --set output.measure=false"

pytestmark = pytest.mark.timeout(1200)


def launched(words: list[str], folder: Path, log: Path) -> int:
    """Be an installed program in a folder, with its output in a file; return its exit code."""
    os.chdir(folder)
    speak_into(log)
    os.environ |= {"PYTHONPATH": str(ROOT)}
    sys.argv = words
    (program,) = entry_points(group="console_scripts", name=words[0])
    code = program.load()()
    return int(code or 0)


def test_two_processes_are_one_training(tmp_path: Path) -> None:
    docs = ROOT / "docs"
    page = (docs / "many-gpus.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- ci:several -->\n```sh\n(.+?)```", page, re.DOTALL)
    assert block is not None
    commands = {line.split()[0]: line for line in block[1].splitlines()}
    assert list(commands) == ["accelerate", "torchrun"]
    front = "accelerate launch --config_file launch/two-gpus.yaml -m lora_trainer DATASET"
    assert front in (docs / "commands.md").read_text(encoding="utf-8")
    for name in ("datasets", "launch"):  # a folder that looks like the checkout to the command
        (tmp_path / name).symlink_to(ROOT / name)
    own = f"--name two --set data.cache_dir={tmp_path}/cache {QUICKER}"

    def launch(program: str, *more: str) -> None:
        """Run a launcher in a fork of this process, which has what it imports; what it starts are new processes."""
        words = [*shlex.split(f"{commands[program]} {own}"), *more]
        log = tmp_path / f"{program}.log"
        code = code_of_fork(partial(launched, words, tmp_path, log))
        assert code == 0, log.read_text(encoding="utf-8")[-3000:]

    launch("accelerate")
    run = tmp_path / "runs" / "two"
    assert [path.name for path in run.parent.iterdir()] == ["two"], "one run, not two"
    record = read_record(run)
    assert record.environment.exactness["processes"] == 2
    assert record.settings["logging.trackers"] == ["tensorboard"]
    assert len(events(run, "step")) == STEPS
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    every = record.settings["sampling.every_steps"]  # the plan draws fewer on a slow machine
    assert [row["step"] for row in events(run, "sample")] == sorted(
        {*range(0, STEPS, every), STEPS}
    )
    assert events(run, "validation")
    assert (run / "two.safetensors").is_file() and (run / "report.html").is_file()
    problems = read_jsonl(run / "problems.jsonl")
    assert [row["what"] for row in problems if row["severity"] == "error"] == []
    # The other launcher starts and connects its two processes; nothing is left to train.
    launch("torchrun", "--resume")
    (resumed,) = events(run, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", STEPS)
