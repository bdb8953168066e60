"""`lora-train queue`: what it takes, refuses and says; and one queue of real trainings, start to end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lora_trainer.cli import main
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.status import read_status
from tests.fakes.queues import Place, until
from tests.fakes.runs import QUIET, ROOT, start, toy

pytestmark = pytest.mark.timeout(300)  # a loaded machine is not a failure


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    place = Place(folder=tmp_path)
    yield place
    place.clean_up()


@pytest.fixture
def held(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A queue that nobody works through."""
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    return place


Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return what `lora-train queue` prints: its answer, or with `code=2` its error, which is one line."""

    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main.run(["queue", *words]) == code
        out, error = capsys.readouterr()
        assert (error if code == 0 else out) == ""
        assert code == 0 or (error.startswith("error: ") and error.count("\n") == 1)
        return error if code else out

    return said


def test_a_training_is_queued_with_its_words_its_place_and_the_queues_folder(
    held: Place, said: Said
) -> None:
    """An item is called as its run will be."""
    line = ["add", "--runs", "mine", "--", "my cats", "--steps", "5", "--set", "train.seed=1"]
    assert said(*line) == "0001-my-cats\n"
    (item,) = commands.items(held.folder / "mine")
    assert item.argv == ("--output", "mine", "my cats", "--steps", "5", "--set", "train.seed=1")
    assert (item.folder, item.label, item.state) == (str(held.folder), "my cats", "waiting")
    for words, label in (
        (["cats", "--name", "tabby"], "tabby"),
        (["cats/../dogs/", "--output", "runs"], "dogs"),
        (["owls", "--resume-from", "runs/owls"], "owls"),
        (["--label", "by me", "--", "--strict", "cats"], "by me"),
    ):
        said("add", *words) if "--" in words else said("add", "--", *words)
        assert commands.items(held.runs)[-1].label == label


def test_what_cannot_train_is_refused_before_it_waits(held: Place, said: Said) -> None:
    for words, named in (
        ([], "DATASET"),
        (["cats", "--stepz", "5"], "--stepz"),
        (["cats", "--steps", "many"], "many"),
        (["cats", "--set", "train.stepz=5"], "train.steps"),
        (["cats", "--steps", "5", "--set", "train.steps=6"], "given twice"),
        (["cats", "--dry-run"], "only trainings"),
        (["plan", "cats"], "only trainings"),
        (["--help"], "only trainings"),
        (["cats", "--set", "output.folder=elsewhere"], "--runs elsewhere"),
        (["cats", "--resume-from", "elsewhere/cats"], "--runs elsewhere"),
        (["cats", "--set", "output.author=hf_" + "a" * 34], "token"),
    ):
        assert named in said("add", "--", *words, code=2), words
    assert not held.runs.exists()
    said("remove", "0009-x", code=2)
    said("move", "x", "2", code=2)


def test_the_list_is_in_order_and_its_json_is_the_items(held: Place, said: Said) -> None:
    assert said("list") == "the queue is empty\n"
    assert json.loads(said("list", "--json")) == []
    for name in ("[b]cats", "dogs", "owls"):
        said("add", "--", name)
    said("move", "0003-owls", "up")
    said("move", "0001-b-cats", "down")
    said("remove", "0002-dogs")
    rows = json.loads(said("list", "--json"))
    assert [row["id"] for row in rows] == ["0003-owls", "0001-b-cats"]
    assert rows[0]["argv"] == ["--output", "runs", "owls"]
    text = said("list")
    assert text.index("0003-owls") < text.index("0001-b-cats")
    assert "[b]cats" in text
    assert "not running; start it" in text
    # One that ended unseen is told, and nothing is started.
    held.become(held.item("0003-owls"), state="running", pid=2**30, pid_started_s=1.0)
    rows = json.loads(said("list", "--json"))
    assert [row["state"] for row in rows] == ["waiting", "interrupted"]
    said("remove", "0003-owls")


def test_a_real_training_through_the_queue(place: Place, said: Said) -> None:
    """On a tiny base, by a worker that `add` starts; nobody looks on."""
    toys = toy(place.folder).with_base()
    words = toys.arguments("--name", "two words; $(x)", steps=2, **QUIET)
    said("add", "--", *words)
    until(lambda: all(item.has_ended for item in commands.items(place.runs)))
    (item,) = commands.items(place.runs)
    assert (item.state, item.error, item.exit_code) == ("finished", "", 0)
    assert item.run == "two words; $(x)"
    assert read_status(place.runs / item.run).step == 2
    assert (place.runs / item.run / f"{item.run}.safetensors").is_file()


def test_a_worker_in_a_terminal_ends_when_asked_and_its_training_goes_on(
    held: Place, said: Said
) -> None:
    dataset = toy(held.folder).dataset
    os.mkfifo(held.folder / "settings.json")  # a training that waits as long as we like
    said("add", "--", str(dataset), "--config", "settings.json")
    worker = start("queue", "run")
    until(lambda: held.item("0001-toy").pid is not None)
    worker.send_signal(signal.SIGINT)
    out, error = worker.communicate(timeout=60)
    assert worker.returncode == 128 + signal.SIGINT
    assert "running trainings continue" in error and error.count("\n") == 1
    assert out.startswith("0001-toy started")
    item = held.item("0001-toy")
    assert item.state == "running"
    assert psutil.pid_exists(item.pid or 0)
