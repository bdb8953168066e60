"""The buttons of a run: requests, the last resort, resume through the queue, the best step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lora_trainer.gui import drafts, run_actions, run_state
from lora_trainer.gui.run_state import END_AFTER_S
from lora_trainer.gui.run_view import head
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.queue import commands
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import fake_run


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def folder(work: Workplace) -> Path:
    folder = until(fake_run(work.runs / "live", steps=30), 12)
    write_status(folder)
    return folder


@pytest.fixture
def trainer(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that obeys nothing, as the one that trains the run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started_s = psutil.Process(process.pid).create_time()
        write_status(folder, pid=process.pid, pid_started_s=started_s)
        yield process
        process.kill()


def test_a_request_is_a_file_in_the_control_folder(work: Workplace, folder: Path) -> None:
    run_actions.ask(work, "live", "sample")
    assert Control(folder).pending() == {"sample"}
    write_status(folder, state="finished", exit_code=0)
    with pytest.raises(RequestError, match="is not being trained"):
        run_actions.ask(work, "live", "stop")
    with pytest.raises(RequestError, match="no run"):
        run_actions.ask(work, "../live", "stop")
    assert Control(folder).pending() == {"sample"}


def test_a_process_is_ended_only_after_it_was_told_to_stop_at_once_for_some_time(
    work: Workplace, folder: Path, trainer: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(RequestError, match="may still end by itself"):
        run_actions.end(work, "live")
    run_actions.ask(work, "live", "stop_now")
    with pytest.raises(RequestError, match="may still end by itself"):
        run_actions.end(work, "live")
    asked_s = time.time() - END_AFTER_S - 1
    os.utime(folder / "control" / "stop_now", (asked_s, asked_s))
    assert trainer.poll() is None
    run_actions.end(work, "live")
    assert trainer.wait() != 0
    assert read_status(folder).state == "interrupted"
    run_actions.end(work, "live")  # from a second tab: nothing is left to end


def test_resume_goes_through_the_queue(
    work: Workplace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(commands, "ensure_worker", started.append)
    with pytest.raises(RequestError, match="being trained already"):
        run_actions.resume(work, "live")
    write_status(folder, state="stopped", exit_code=143)
    with pytest.raises(InputError, match="does not say where its images are"):
        run_actions.resume(work, "live")
    images = tmp_path / "images"
    images.mkdir()
    run_actions.resume(work, "live", dataset=str(images))
    (item,) = commands.items(work.runs)
    assert item.argv == (str(images), f"--resume-from={folder.resolve()}")
    assert started == [work.runs]
    with pytest.raises(RequestError, match="in the queue already"):
        run_actions.resume(work, "live", dataset=str(images))


def test_the_best_step_has_to_be_a_number(work: Workplace, folder: Path) -> None:
    (folder / "zorble-step00000010.safetensors").write_bytes(b"ten")
    for step in ("10", None, True, 10.0, [10]):
        with pytest.raises(RequestError, match="no step"):
            run_actions.use_as_best(work, "live", step)
    assert run_actions.use_as_best(work, "live", 10).file == "live-best.safetensors"


def test_a_run_is_trained_again_with_what_was_chosen_for_it(
    work: Workplace, folder: Path, tmp_path: Path
) -> None:
    images = tmp_path / "zorble"
    images.mkdir()
    record = json.loads((folder / "run.json").read_text())
    record["dataset"]["name"] = images.name
    record["command"][1] = str(images)
    record["plan"]["priority"] = "quality"
    record["settings"]["output.name"] = "mine"
    record["origins"]["output.name"] = {"layer": "command line", "reason": ""}
    (folder / "run.json").write_text(json.dumps(record))
    draft = run_actions.clone(work, "live")
    assert draft == drafts.read(work, draft.id)
    assert (draft.dataset, draft.base, draft.priority) == (str(images), "embedded", "quality")
    assert draft.settings == {"train.steps": 30, "data.trigger": "zorble thing"}
    assert (draft.name, draft.step) == ("", 2)
    for origin in record["origins"].values():
        origin["layer"] = "resumed run"
    (folder / "run.json").write_text(json.dumps(record))
    images.rmdir()
    again = run_actions.clone(work, "live")
    assert (again.dataset, again.step) == ("", 1)
    assert again.settings["data.trigger"] == "zorble thing"
    assert not any(key.startswith("memory.") for key in again.settings)


@pytest.mark.parametrize(
    ("message", "chosen", "offered", "then"),
    [
        (
            "the learning rate, 1e-12, is far too low. Fix: leave optimizer.learning_rate out "
            "for the preset's, which suits most images",
            {"optimizer.learning_rate": 1e-12},
            "Train again with the usual learning rate, 0.0001",
            {},
        ),
        (
            "the adapter's update is scaled by only 0.001 (adapter.alpha / adapter.rank). Fix: leave "
            "adapter.alpha out; it then equals adapter.rank",
            {"adapter.alpha": 0.01},
            "Train again, alpha as usual",
            {},
        ),
        (
            "the loss is not finite. Fix: lower optimizer.learning_rate, or use "
            "--set train.precision=fp32, and resume",
            {},
            "Train again with precision fp32",
            {"train.precision": "fp32"},
        ),
        ("the disk is full. Fix: free some space", {}, "", {}),
    ],
)
def test_a_failed_run_is_trained_again_with_the_setting_that_mends_it(
    work: Workplace,
    folder: Path,
    message: str,
    chosen: dict[str, object],
    offered: str,
    then: dict[str, object],
) -> None:
    record = json.loads((folder / "run.json").read_text())
    record["settings"] |= chosen
    record["origins"] |= {key: {"layer": "command line", "reason": ""} for key in chosen}
    (folder / "run.json").write_text(json.dumps(record))
    write_status(folder, state="failed", exit_code=5, message=message)
    seen = run_state.look(folder, read_status(folder), now_s=time.time())
    assert not run_state.possible(seen).resume
    page = head(seen, read_history(folder))
    assert offered in page and ("mended=1" in page) is bool(offered)
    usual = {"train.steps": 30, "data.trigger": "zorble thing"}
    assert run_actions.clone(work, "live").settings == {**usual, **chosen}
    mended = run_actions.clone(work, "live", mended=True)
    assert mended.settings == {**usual, **then} and mended == drafts.read(work, mended.id)
