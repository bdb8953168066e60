"""TRN-05 and 06: logs and dashboards that fail cost no run; what prepares the steps never hangs one.

Steps are prepared by one thread of the process, so there is no worker to be killed, to crash alone
or to be spawned; what is left of TRN-06 is a thread that raises, ends or waits for a disk.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import TensorBoardTracker

from lora_trainer.common import files
from lora_trainer.common.events import read_jsonl
from lora_trainer.reporting import status
from lora_trainer.training.batch import Sample
from lora_trainer.training.dataloader import TrainingDataLoader
from tests.fakes.runs import STEPS, Toy, events, toy, trajectory
from tests.fakes.training import build_feeder

QUIET: dict[str, Any] = {"sampling__every_steps": 0, "train__validate_every_steps": 0}


pytestmark = pytest.mark.usefixtures("no_hang")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run."""
    place = toy(tmp_path_factory.mktemp("trn")).with_base()
    assert place.train(**QUIET, logging__trackers=[]) == 0
    return place


def failing(after: int, error: OSError) -> Callable[..., None]:
    calls = 0

    def fail(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    return fail


# ---- TRN-05


def test_trn_05_a_dashboard_that_fails_is_one_warning(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(TensorBoardTracker, "log", failing(3, error))
    assert place.train("--name", "full", **QUIET, logging__trackers=["tensorboard"]) == 0
    rows = read_jsonl(place.runs / "full" / "problems.jsonl")
    (complaint,) = (row["what"] for row in rows if row["code"] == "TRN-05")
    assert complaint.startswith("tracker tensorboard stopped logging: ")
    assert str(error) in complaint
    assert trajectory(place.runs / "full") == trajectory(place.run)


@pytest.mark.parametrize(
    ("file", "lines", "steps"), [("events.jsonl", 4, 2), ("status.json", 5, STEPS)]
)
def test_trn_05_a_log_whose_disk_is_full_is_one_warning(
    file: str,
    lines: int,
    steps: int,
    place: Toy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refuse = failing(lines, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    real_open, real_write = Path.open, files.write_file

    def open_(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self.name == file and mode == "a":
            refuse()
        return real_open(self, mode, *args, **options)

    def write(path: Path, data: files.Data, *, durable: bool) -> None:
        if path.name.endswith(file):
            refuse()
        real_write(path, data, durable=durable)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(files, "write_file", write)
    monkeypatch.setattr(status, "INTERVAL_S", 0.0)
    capsys.readouterr()
    name = f"no-{Path(file).stem}"
    assert place.train("--name", name, **QUIET, logging__trackers=[]) == 0
    run, shown = place.runs / name, capsys.readouterr()
    assert (run / f"{name}.safetensors").exists()
    assert (run / "report.html").exists()
    assert (shown.out + shown.err).count("No space left on device") == 1
    assert len(events(run, "step")) == steps


# ---- TRN-06


def test_trn_06_whatever_ends_the_thread_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SystemExit(3)
    usual = TrainingDataLoader.prepare

    def prepare(self: TrainingDataLoader, step: int) -> tuple[Sample, ...]:
        if step == 2:
            raise error
        return usual(self, step)

    monkeypatch.setattr(TrainingDataLoader, "prepare", prepare)
    with build_feeder().stream(0, 10, ahead=4) as batches:
        assert next(batches) and next(batches)
        with pytest.raises(SystemExit) as raised:
            next(batches)
        assert raised.value is error


def test_trn_06_a_disk_that_does_not_answer_holds_up_nobody_who_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third signal raises KeyboardInterrupt while the thread hangs in a read."""
    begun, answered = threading.Event(), threading.Event()

    def prepare(self: TrainingDataLoader, step: int) -> None:
        begun.set()
        answered.wait()

    monkeypatch.setattr(TrainingDataLoader, "prepare", prepare)
    monkeypatch.setattr("lora_trainer.cache.background.LEAVING_S", 0.05)
    try:
        with pytest.raises(KeyboardInterrupt), build_feeder().stream(0, 10, ahead=4):
            assert begun.wait(20)
            raise KeyboardInterrupt
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "lora-train-ahead":
                thread.join()
