"""Which runs there are, and that no name of one leads anywhere else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from lora_trainer.gui import state

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import fake_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def running(root: Path) -> Path:
    folder = until(fake_run(root / "live", steps=30), 12)
    write_status(folder)
    return folder


def test_runs_that_train_come_first_then_the_newest(root: Path, running: Path) -> None:
    for age, name in enumerate(("newer", "older"), start=1):
        folder = fake_run(root / name, steps=3).write()
        write_status(folder, state="finished", step=3, steps=3, exit_code=0)
        for file in folder.glob("*.json*"):
            os.utime(file, (time.time() + 10 - age, time.time() + 10 - age))
    entries = state.runs(root)
    assert [entry.name for entry in entries] == ["live", "newer", "older"]
    assert [entry.status.state for entry in entries][:2] == ["running", "finished"]


def test_only_folders_with_records_are_runs(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "file").write_text("")
    hidden = root / ".gui"
    hidden.mkdir()
    (hidden / "run.json").write_text("{}")
    assert state.runs(root) == ()
    assert state.runs(root / "missing") == ()
    for name in ("empty", "file", ".gui"):
        with pytest.raises(RequestError, match="no run"):
            state.run_folder(root, name)


@pytest.mark.parametrize(
    "name",
    ["../secret", "..", ".", "", "live/..", "live/", "live/../../secret", "link", "\0", "x" * 300]
    + [None, "\ud800"],
)
def test_no_name_leads_out_of_the_root(root: Path, running: Path, name: str | None) -> None:
    secret = root.parent / "secret"
    fake_run(secret, steps=3).write()
    (root / "link").symlink_to(secret, target_is_directory=True)
    assert [entry.name for entry in state.runs(root)] == ["live"]
    for asked in (name, str(secret), str(running)):
        with pytest.raises(RequestError, match="no run"):
            state.run_folder(root, asked)
    assert state.run_folder(root, "live") == running


def test_stamp_changes_with_what_is_seen_and_not_with_a_heartbeat(running: Path) -> None:
    before = state.stamp(running, read_status(running))
    write_status(running, heartbeat_s=0.0)
    assert state.stamp(running, read_status(running)) == before
    Control(running).request("save")
    asked = state.stamp(running, read_status(running))
    with (running / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n")
    written = state.stamp(running, read_status(running))
    write_status(running, done=13)
    further = state.stamp(running, read_status(running))
    write_status(running, pid=2**22 - 3)
    dead = state.stamp(running, read_status(running))
    assert len({before, asked, written, further, dead}) == 5
