"""Whole runs on a tiny base: a generated dataset in three shapes, the command line, what a run left.

A run of six steps takes about a second. `Toy` is a place with a dataset, a base, a cache and runs;
runs happen in this process or in another one, always through the command line.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from lora_trainer.cli import main
from lora_trainer.common.events import read_jsonl
from lora_trainer.reporting.run_record import read as read_record

ROOT = Path(__file__).resolve().parents[2]
Sizes = Sequence[tuple[int, int]]
SIZES_PX: Sizes = ((40, 40), (48, 32), (32, 48))
SQUARES_PX: Sizes = SIZES_PX[:1]
STEPS = 6
SETTINGS: Mapping[str, Any] = {
    "data.resolution": 16,
    "data.validation_fraction": 0.2,  # one of six
    "hardware.threads": 1,
    # A third of a run of six steps. Whole runs that are looked at from all sides have it on: of each family, each
    # adapter, all options, several processes, pairs.
    "output.measure": False,
    "output.save_every_steps": 2,
    "sampling.every_steps": 3,
    "sampling.prompts": ["a toy"],
    "sampling.steps": 2,
    "train.validate_every_steps": 3,
}
QUIET: Mapping[str, Any] = {
    "logging__trackers": [],
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}
"""Nothing beside the training but its saves, as arguments of `Toy.train`."""
MEASURES = ("step", "loss", "lr", "grad_norm")
Point = tuple[str, str, int, bool]
"""Where a run is killed: module, function, number of the call, and whether after it."""
BETWEEN_SAVES: Point = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
"""At the third copy of a state; the first is of the start, the second of the first save."""
ELSEWHERE = """
import json, sys
from scripts.reliability.kill import load_everything
from tests.fakes.runs import run_killed
load_everything()
run_killed(json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Where the runs of a test are; `base` is missing until `with_base` writes it.

    A copy has other runs, and the same dataset, base and cache: their paths are part of what a resume compares.
    """

    folder: Path
    other_runs: Path | None = None

    @property
    def dataset(self) -> Path:
        return self.folder / "toy"

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def runs(self) -> Path:
        return self.other_runs or self.folder / "runs"

    @property
    def run(self) -> Path:
        """The folder of the first run."""
        return self.runs / "toy"

    def arguments(self, *more: str, steps: int | None = STEPS, **settings: Any) -> list[str]:
        """Return a training's command line; `settings` are written section__name."""
        chosen = {**SETTINGS, "data.cache_dir": str(self.cache)}
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        line = [str(self.dataset), "--base", str(self.base), "--output", str(self.runs)]
        line += [] if steps is None else ["--steps", str(steps)]
        for key, value in chosen.items():
            line += ["--set", f"{key}={json.dumps(value)}"]
        return [*line, *more]

    def train(self, *more: str, steps: int | None = STEPS, **settings: Any) -> int:
        """Train in this process; return the exit code."""
        return run_cli(self.arguments(*more, steps=steps, **settings))

    def copy(self, folder: Path) -> Toy:
        """Return this place with other runs: a copy, for a test that goes on with one."""
        shutil.copytree(self.runs, folder)
        return replace(self, other_runs=folder)

    def with_base(self, *, seed: int = 0) -> Toy:
        """Write the base, which imports torch; return self."""
        from tests.fakes.tiny_base import write_base

        shutil.rmtree(self.base, ignore_errors=True)
        write_base("sd15", self.base, seed=seed)
        return self


def toy(folder: Path, *, images: int = 6, sizes: Sizes = SIZES_PX) -> Toy:
    """Write a dataset of captioned images into `folder`/toy."""
    place = Toy(folder=folder)
    write_dataset(place.dataset, images=images, sizes=sizes)
    return place


def write_dataset(
    folder: Path, *, images: int, first: int = 0, sizes: Sizes = SIZES_PX, name: str = "p"
) -> None:
    """Write sharp, distinct images with captions, of three shapes; a step is one pass where all have one."""
    folder.mkdir(parents=True)
    for index in range(images):
        width, height = sizes[index % len(sizes)]
        noise = random.Random(first + index).randbytes(width * height * 3)
        Image.frombytes("RGB", (width, height), noise).save(folder / f"{name}{index}.png")
        (folder / f"{name}{index}.txt").write_text(f"a toy with {index} legs", encoding="utf-8")


def write_priors(place: Toy) -> dict[str, Any]:
    """Write masks of two images, and regularisation images beside the dataset; return all their settings."""
    place_of_masks, other = place.dataset / "masks", place.folder / "others"
    place_of_masks.mkdir()
    for index in range(2):
        mask = Image.new("L", SIZES_PX[index], 0)
        mask.paste(255, (0, 0, SIZES_PX[index][0] // 2, SIZES_PX[index][1]))
        mask.save(place_of_masks / f"p{index}.png")
    write_dataset(other, images=3, first=100)
    return {
        "data__class_word": "thing",
        "data__masks": "files",
        "data__regularisation_dir": str(other),
        "data__regularisation_ratio": 0.7,
        "data__trigger": "zwx",
        "objective__preservation_weight": 0.5,
        "objective__prior": "base",
        "objective__prior_weight": 0.8,
    }


def run_cli(arguments: list[str]) -> int:
    """Run the command line in this process and leave the process as it was."""
    import torch

    threads = torch.get_num_threads()
    with patch.dict(os.environ):
        try:
            return main.run(arguments)
        finally:
            torch.set_num_threads(threads)


@contextmanager
def heard_by(listener: Callable[[Any], None]) -> Iterator[None]:
    """Let a listener hear every event of the trainings that the command line starts while the block runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lora_trainer.queue.commands.download_listeners", lambda _: (listener,))
        yield


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `python -m lora_trainer` as a person would."""
    return subprocess.Popen(
        [sys.executable, "-m", "lora_trainer", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(
    script: str, *arguments: str, timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process that finds lora_trainer."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def run_in_processes(arguments: list[str], count: int, log: Path) -> list[int]:
    """Run a command line in several processes of one training, forks of this process; return their exit codes."""
    from scripts.reliability import kill  # which imports this module

    gc.freeze()  # else collecting copies every page in every child
    return kill.wait(kill.start(arguments, log, processes=count))


def run_killed(work: Sequence[tuple[list[str], Point]]) -> None:
    """Run each command line in a fork of this process that kills itself at its point.

    One that does not come there fails. A fork has imported what this process has, which costs a new process 5 s.
    """
    gc.freeze()  # else collecting copies every page in every child
    for arguments, point in work:
        code = code_of_fork(partial(_run_until_killed, arguments, point))
        assert code == -signal.SIGKILL, f"exit code {code} without coming to {point}"


def _run_until_killed(arguments: list[str], point: Point) -> int:
    import torch

    torch.set_num_threads(1)  # threads of a pool are not there after a fork
    kill_at(*point)
    return run_cli(arguments)


def code_of_fork(does: Callable[[], int]) -> int:
    """Let a fork of this process do something, and wait for its end; return the exit code, negative for a signal."""
    child = forked(does)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:  # a test that takes too long
        os.kill(child, signal.SIGKILL)
        raise


def forked(does: Callable[[], int]) -> int:
    """Let a fork of this process do something and end with the code that it returns; return the fork's number."""
    with warnings.catch_warnings():
        # Since Python 3.12 a fork beside threads is warned of. Those of a test process wait for a library;
        # none holds a lock that a training needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = does()
    except BaseException:  # noqa: BLE001 - nothing of the test may go on in the fork
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def speak_into(log: Path) -> None:
    """Let this process, a fork, write all that it says to the end of a file: of pytest it has what catches output."""
    file = log.open("a", encoding="utf-8", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file


def run_killed_elsewhere(
    work: Sequence[tuple[list[str], Point]], *, timeout_s: float = 280
) -> None:
    """Do what `run_killed` does in a new process, where sets have another order."""
    done = python(ELSEWHERE, json.dumps(work), timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-2000:]


def kill_at(module: str, name: str, call: int, after: bool) -> None:
    """Let this process kill itself at a call of a function, or after it."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), itertools.count(1)

    def killing(*args: Any, **kwargs: Any) -> Any:
        is_reached = next(calls) == call
        if is_reached and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if is_reached:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, killing)


def assert_same_run(run: Path, whole: Path) -> None:
    """Assert that a resumed run has the steps, validations, samples, last state and files of another, bit for bit."""
    assert trajectory(run) == trajectory(whole) != []
    losses = [[row["loss"] for row in events(each, "validation")] for each in (run, whole)]
    assert losses[0] == losses[1]
    assert last_state(run).name == last_state(whole).name
    assert contents(last_state(run)) == contents(last_state(whole))
    if (whole / "samples").is_dir():
        assert contents(run / "samples") == contents(whole / "samples")
    for file in ("{}.safetensors", "{}-best.safetensors", "embeddings/{}_emb.safetensors"):
        ours, theirs = (each / file.format(each.name) for each in (run, whole))
        assert ours.exists() == theirs.exists()
        assert not theirs.exists() or same_tensors(load_file(ours), load_file(theirs)), file


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether both hold the same arrays under the same names."""
    return one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings in run.json."""
    return dict(read_record(run).settings)


def pixels(file: Path) -> Any:
    """Return an image's numbers, of which a difference can be taken."""
    return np.asarray(Image.open(file), np.int16)


def apart(one: Path, other: Path) -> int:
    """Return the largest difference of two images, of 255."""
    return int(np.abs(pixels(one) - pixels(other)).max())


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind."""
    return [row for row in read_jsonl(run / "events.jsonl") if row["event"] == kind]


def problems(run: Path) -> list[dict[str, Any]]:
    """Return what was reported as skipped, clamped, retried or wrong."""
    return list(read_jsonl(run / "problems.jsonl"))


def trajectory(run: Path) -> list[tuple[Any, ...]]:
    """Return what each logged step measured, in the order of the file."""
    return [tuple(row[name] for name in MEASURES) for row in events(run, "step")]


def last_state(run: Path) -> Path:
    """Return the folder of the newest state."""
    return max((run / "states").glob("step-*"))


def listing(folder: Path, *, without: Iterable[str] = ()) -> dict[str, tuple[int, int, str]]:
    """Return mode, mtime and content hash of everything in a folder, and of itself."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        name = path.relative_to(folder).as_posix()
        if path.name in without:
            continue
        stat = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[name] = (stat.st_mode, stat.st_mtime_ns, digest)
    return found


def contents(folder: Path, *, without: Iterable[str] = ()) -> dict[str, str]:
    """Return the content hash of every file in a folder."""
    rows = listing(folder, without=without).items()
    return {name: digest for name, (_, _, digest) in rows if digest}
