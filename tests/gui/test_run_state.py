"""What is said of a run at each moment, and which buttons are offered then."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui.run_state import (
    END_AFTER_S,
    Look,
    Possible,
    explained,
    left_text,
    look,
    possible,
    recovery,
    remarks,
    sentence,
)

from lora_trainer.queue import commands
from lora_trainer.reporting.control import Control, Request
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import fake_run

DEAD = 2**22 - 3
TRAINING = Possible(save=True, sample=True, stop=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 30 steps at step 12; its last save was at step 10."""
    return until(fake_run(tmp_path / "runs" / "live", steps=30), 12)


def now(folder: Path, *, later_s: float = 0.0) -> Look:
    return look(folder, read_status(folder), now_s=time.time() + later_s)


def said(folder: Path) -> str:
    return sentence(now(folder), read_history(folder))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "Training."),
        (
            {"phase": "cache", "done": 14, "total": 23, "message": "x.png"},
            "Preparing the images: 14 of 23.",
        ),
        (
            {"phase": "cache", "done": 3, "total": 9, "message": "captions"},
            "Preparing the captions: 3 of 9.",
        ),
        ({"phase": "sample", "done": 1, "total": 4}, "Making sample images 1 of 4."),
        ({"phase": "load"}, "Loading the base model."),
        ({"phase": "", "state": "starting"}, "Starting."),
        ({"phase": "", "state": "training"}, "Training."),
        ({"phase": "novel", "message": "something new"}, "something new."),
        ({"phase": "stop"}, "Saving the state, step 12."),
        ({"phase": "quit"}, "Stopping at once, without saving."),
        ({"state": "finished", "exit_code": 0}, "Finished after 12 steps."),
        (
            {"state": "stopped", "exit_code": 143},
            "Stopped at step 12 of 30, its state saved; Resume goes on from there.",
        ),
        ({"state": "failed", "exit_code": 4}, "Failed at step 12 of 30."),
        ({"pid": DEAD}, "Interrupted at step 12 of 30."),
    ],
)
def test_one_sentence_says_what_it_does(folder: Path, fields: dict[str, Any], words: str) -> None:
    write_status(folder, **fields)
    assert said(folder).startswith(words)


def test_stop_saves_force_stop_does_not_and_a_process_that_obeys_neither_is_ended(
    folder: Path,
) -> None:
    write_status(folder)
    assert possible(now(folder)) == TRAINING
    Control(folder).request("stop")
    assert possible(now(folder)) == Possible(force=True)
    assert said(folder).startswith("Asked to stop")
    write_status(folder, phase="stop")  # it has seen the request
    Control(folder).done("stop")
    assert possible(now(folder)) == Possible(force=True)
    assert "goes on from step 10" in remarks(now(folder), read_history(folder))[0]
    Control(folder).request("stop_now")
    assert possible(now(folder)) == Possible()
    later = now(folder, later_s=END_AFTER_S + 1)
    assert possible(later) == Possible(end=True)
    assert str(os.getpid()) in remarks(later, read_history(folder))[0]


def test_one_that_has_seen_force_stop_and_hangs_can_be_ended_too(folder: Path) -> None:
    write_status(folder, phase="quit", heartbeat_s=time.time() - END_AFTER_S - 1)
    assert possible(now(folder)) == Possible(end=True)
    write_status(folder, phase="quit")
    assert possible(now(folder)) == Possible()


@pytest.mark.parametrize("state", ["stopped", "failed", "interrupted"])
def test_what_ended_early_can_be_resumed(folder: Path, state: str) -> None:
    write_status(folder, **({"pid": DEAD} if state == "interrupted" else {"state": state}))
    assert read_status(folder).state == state
    assert possible(now(folder)) == Possible(resume=True)
    write_status(folder, state="finished")
    assert possible(now(folder)) == Possible()


def test_a_run_that_waits_in_the_queue_to_go_on_says_so(folder: Path) -> None:
    write_status(folder, state="stopped", exit_code=143)
    words = ["datasets/x", f"--resume-from={folder.resolve()}"]
    commands.add(folder.parent, words, label="live")
    assert said(folder) == "Waits in the queue to be resumed from step 12 of 30."
    assert possible(now(folder)) == Possible()
    commands.remove(folder.parent, commands.items(folder.parent)[0].id)
    assert possible(now(folder)) == Possible(resume=True)


def test_a_failure_is_told_with_what_to_do(folder: Path) -> None:
    message = "the disk is full. Fix: free some space."
    write_status(folder, state="failed", exit_code=4, message=message)
    history = read_history(folder)
    assert explained(now(folder), history) == ("the disk is full.", "free some space.")
    write_status(folder, pid=DEAD)
    what, fix = explained(now(folder), history) or ("", "")
    assert "without a word" in what and "from step 10" in fix
    write_status(folder)
    assert explained(now(folder), history) is None
    (folder / "status.json").write_text("[]")
    assert "cannot be read" in (explained(now(folder), history) or ("", ""))[0]


@pytest.mark.parametrize(("request_", "word"), [("save", "to save"), ("sample", "sample images")])
def test_a_request_that_waits_is_said(folder: Path, request_: Request, word: str) -> None:
    write_status(folder)
    assert remarks(now(folder), read_history(folder)) == []
    Control(folder).request(request_)
    (line,) = remarks(now(folder), read_history(folder))
    assert word in line


def test_silence_of_a_process_that_lives_is_said(folder: Path) -> None:
    write_status(folder, heartbeat_s=time.time() - 200)
    assert "nothing for 3 min" in remarks(now(folder), read_history(folder))[0]
    write_status(folder, heartbeat_s=time.time() - 200, state="finished")
    assert remarks(now(folder), read_history(folder)) == []


def test_a_recovery_from_out_of_memory_is_said_until_the_batch_has_grown_back(
    tmp_path: Path,
) -> None:
    run = fake_run(tmp_path / "runs" / "full", steps=30)
    folder = until(run, 20)
    write_status(folder)
    (line,) = remarks(now(folder), read_history(folder))
    assert line.startswith("Recovered from out of memory at step 15: images at a time 8 -> 4")
    run.emit("change", key="memory.micro_batch", old=4, new=8, reason="50 steps in a row fitted")
    run.write()
    assert recovery(read_history(folder)) is None


def test_time_left_is_no_more_exact_than_it_can_be() -> None:
    assert left_text(12.3) == "about 13 s"
    assert left_text(600.0) == "about 10 min 00 s"
    assert left_text(math.nan) == left_text(-1.0) == ""
