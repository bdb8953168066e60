"""CKP-07: signals. The first saves and ends, at any moment; copies of it count once; the third quits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.checkpoint import writer as checkpoint_writer
from lora_trainer.checkpoint.states import write_state
from lora_trainer.common.events import Event
from lora_trainer.reporting.control import StopFlag
from lora_trainer.reporting.status import read_status
from tests.fakes.runs import Toy, events, heard_by, last_state, problems, toy, trajectory

Moment = Callable[[Event], bool]
MOMENTS: dict[str, tuple[int, int, Moment, int]] = {
    "in a step": (
        signal.SIGHUP,
        143,
        lambda event: event.kind == "step" and event.fields["step"] == 3,
        3,
    ),
    "while saving": (
        signal.SIGTERM,
        143,
        lambda event: event.kind == "saved" and event.fields["step"] == 2,
        3,
    ),
    "before the first step": (signal.SIGINT, 130, lambda event: phase(event, "train"), 1),
}
"""The signal, the exit code, when it comes, and the first step at which the run may end."""


def phase(event: Event, name: str) -> bool:
    return event.kind == "phase" and event.fields["phase"] == name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run."""
    place = toy(tmp_path_factory.mktemp("stopping")).with_base()
    assert place.train(logging__trackers=[]) == 0
    return place


@pytest.fixture(autouse=True)
def a_terminal_that_can_be_closed() -> Iterator[None]:
    """Under `nohup` SIGHUP is ignored, and stays so in a training."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def train(
    place: Toy, name: str, moment: Moment, *numbers: int, **settings: Any
) -> tuple[Path, int]:
    """Train, signalling this process once; return run folder and exit code. The main thread handles signals."""
    sent = []

    def listener(event: Event) -> None:
        if not sent and moment(event):
            sent.extend(numbers)
            for number in numbers:
                signal.raise_signal(number)

    with heard_by(listener):
        code = place.train("--name", name, **{"logging__trackers": [], **settings})
    return place.runs / name, code


@pytest.mark.parametrize("when", MOMENTS)
def test_ckp_07_one_signal_saves_whole_steps_and_copies_of_it_count_once(
    when: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal signals the whole group, and launchers forward it. What was saved goes on: test_ckp_resume.py."""
    number, code, moment, step = MOMENTS[when]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run, ended = train(place, when, moment, *[number] * 5)
    assert ended == code
    error = capsys.readouterr().err
    assert "--resume" in error.splitlines()[-1] and "Traceback" not in error
    assert (read_status(run).state, read_status(run).exit_code) == ("stopped", code)
    (stopped,) = events(run, "stopped")
    assert stopped["exit_code"] == code
    assert stopped["step"] in (step, step + 1), "at the end of the step in which it came"
    assert last_state(run).name == f"step-{stopped['step']:08d}"
    assert list(run.glob(f"{when}-step*.safetensors")), "and it can be tried out"
    assert trajectory(run) == trajectory(place.run)[: stopped["step"]]
    assert [signal.getsignal(number) for number in numbers] == before
    assert not [t for t in threading.enumerate() if t.name == "lora-train-signals"]


def test_ckp_07_samples_do_not_hold_up_a_stop(place: Toy) -> None:
    images: list[Event] = []

    def at_step_3(event: Event) -> bool:
        images.extend([event] if event.kind == "sample" else [])
        return bool(images) and phase(event, "sample")

    prompts = ["a toy", "another"]
    run, code = train(place, "unsampled", at_step_3, signal.SIGTERM, sampling__prompts=prompts)
    assert code == 143
    assert [row["step"] for row in events(run, "sample")] == [0, 3]
    assert [image["prompt"] for image in events(run, "sample")[-1]["images"]] == ["a toy"]
    notes = [row["what"] for row in problems(run)]
    assert "1 of 2 sample images at step 3: asked to stop" in notes
    assert any(note.startswith("asked to stop: finishing the step") for note in notes)


def test_ckp_07_caching_stops_between_two_items_and_keeps_them(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = 4
    cache = {"data__cache_dir": str(tmp_path / "cache"), "logging__trackers": []}
    moment: Moment = lambda event: phase(event, "cache") and event.fields["done"] == done  # noqa: E731 - typed
    run, code = train(place, "cached", moment, signal.SIGTERM, **cache)
    assert code == 143 and f"stopped while caching, {done} of " in capsys.readouterr().err
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == done
    assert read_status(run).exit_code == 143
    assert place.train("--name", "cached", "--resume", **cache) == 0
    (cached,) = events(run, "cached")
    assert cached["found"] == done
    assert trajectory(run) == trajectory(place.run)


def test_ckp_07_a_third_signal_quits_though_the_disk_does_not_answer(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save at step 4 hangs; three signals later the state of step 2 is what there is."""
    stuck, opened = threading.Event(), threading.Event()

    def write(folder: Path, frozen: Any, *, keep: int) -> Path:
        if frozen.state.step >= 4:
            stuck.set()
            opened.wait(60)
        return write_state(folder, frozen, keep=keep)

    monkeypatch.setattr(checkpoint_writer, "write_state", write)
    now_s = [0.0]
    flag = partial(StopFlag, clock=lambda: now_s[0])
    monkeypatch.setattr("lora_trainer.run.train.StopFlag", flag)
    answered = threading.Semaphore(0)

    def pull_the_plug() -> None:
        assert stuck.wait(60)
        for _ in range(3):
            now_s[0] += 2
            os.kill(os.getpid(), signal.SIGTERM)
            assert answered.acquire(timeout=60)

    def answer(event: Event) -> None:
        if event.kind == "problem" and event.fields["code"] == "CKP-07":
            answered.release()

    thread = threading.Thread(target=pull_the_plug)
    thread.start()
    try:
        with heard_by(answer):
            assert place.train("--name", "third", logging__trackers=[]) == 130
    finally:
        thread.join()
    run = place.runs / "third"
    assert last_state(run).name == "step-00000002"
    opened.set()
    for writer in [t for t in threading.enumerate() if t.name == "lora-train-state-writer"]:
        writer.join()
    said = [row["what"] for row in problems(run)]
    assert any(what.startswith("still saving; a third signal quits") for what in said)
