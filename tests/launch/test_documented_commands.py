"""The commands of docs/many-gpus.md, as they are written there, on the embedded base with all defaults.

TensorBoard (the extra `log`), samples, validation, saves, the report: what a user gets. Each is the training
that one process does, in the sense of DESIGN: the same first step, the same weights after 20. Samples, which
are most of the time of a run, are drawn by the first command only; no weight depends on them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.common.events import read_jsonl
from tests.fakes.runs import ROOT, events, last_state
from tests.fakes.training import distance

STEPS = 20
NO_SAMPLES = ("--set", "sampling.every_steps=0")
DOCS = ROOT / "docs" / "many-gpus.md"

pytestmark = pytest.mark.timeout(1200)  # the first test trains twice


def documented() -> dict[str, str]:
    """Return the commands of the block marked for CI, by the program they start."""
    block = re.search(
        r"<!-- ci:several -->\n```sh\n(.+?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    return {line.split()[0]: line for line in block[1].splitlines()}


COMMANDS = documented()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout to the commands, and gets their runs."""
    made = tmp_path_factory.mktemp("several")
    for name in ("datasets", "launch"):
        (made / name).symlink_to(ROOT / name)
    return made


def _trained(folder: Path, line: str, name: str, *more: str) -> Path:
    """Do what the line says, in runs/`name`; return that."""
    own = ("--name", name, "--set", f"data.cache_dir={folder / 'cache'}")
    done = subprocess.run(
        [*shlex.split(line), *own, *more],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / name


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    arguments = COMMANDS["torchrun"].partition(" -m ")[2]
    return _trained(folder, f"{shlex.quote(sys.executable)} -m {arguments}", "alone", *NO_SAMPLES)


def _weights(run: Path) -> list[Tensor]:
    tensors = load_file(last_state(run) / ADAPTER)
    return [tensors[key] for key in sorted(tensors)]


def _first(run: Path) -> dict[str, Any]:
    return events(run, "step")[0]


def test_both_launchers_are_documented() -> None:
    assert list(COMMANDS) == ["accelerate", "torchrun"]
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert "accelerate launch --config_file launch/two-gpus.yaml -m lora_trainer DATASET" in page


@pytest.mark.parametrize("program", COMMANDS)
def test_two_processes_are_one_training(program: str, folder: Path, alone: Path) -> None:
    samples = program == "accelerate"
    run = _trained(folder, COMMANDS[program], program, *(() if samples else NO_SAMPLES))
    assert [path.name for path in run.parent.glob(f"{program}*")] == [program], "one run, not two"
    record = json.loads((run / "run.json").read_bytes())
    assert record["environment"]["exactness"]["processes"] == 2
    assert record["settings"]["logging.trackers"] == ["tensorboard"]
    assert len(events(run, "step")) == STEPS
    for key in ("loss", "grad_norm"):
        assert _first(run)[key] == pytest.approx(_first(alone)[key], rel=1e-5)
    ours, theirs = _weights(run), _weights(alone)
    assert distance(ours, theirs) < 5e-5
    assert max(distance([a], [b]) for a, b in zip(ours, theirs, strict=True)) < 1e-3
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    every = record["settings"]["sampling.every_steps"]  # the plan draws fewer on a slow machine
    assert (every > 0) == samples
    sampled = sorted({*range(0, STEPS, every), STEPS}) if samples else []
    assert [row["step"] for row in events(run, "sample")] == sampled
    assert events(run, "validation")
    assert (run / f"{program}.safetensors").is_file() and (run / "report.html").is_file()
    problems = read_jsonl(run / "problems.jsonl")
    assert [row["what"] for row in problems if row["severity"] == "error"] == []
