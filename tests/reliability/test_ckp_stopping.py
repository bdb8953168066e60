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
from lora_trainer.checkpoint.states import load_newest, write_state
from lora_trainer.common.errors import StoppedBySignal
from lora_trainer.common.events import Event, read_jsonl
from lora_trainer.config.config import parse_assignment
from lora_trainer.reporting.status import read_status
from lora_trainer.run import train as run_module
from lora_trainer.run.prepare import Request
from lora_trainer.run.train import StopFlag, TrainRequest, train
from tests.fakes.runs import STEPS, Toy, events, last_state, toy, trajectory

Moment = Callable[[Event], bool]
MOMENTS: dict[str, tuple[Moment, int]] = {
    "in a step": (lambda event: event.kind == "step" and event.fields["step"] == 3, 3),
    "while saving": (lambda event: event.kind == "saved" and event.fields["step"] == 2, 3),
    "while sampling": (lambda event: phase(event, "sample") and event.fields["step"] == 3, 4),
    "in a validation": (
        lambda event: event.kind == "validation" and event.fields["step"] == 3,
        4,
    ),
    "before the first step": (lambda event: phase(event, "train"), 1),
}


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


def asked(place: Toy, name: str, *, resume: bool = False, **settings: Any) -> TrainRequest:
    line = place.arguments(**{"logging__trackers": [], **settings})
    words = [line[index + 1] for index, word in enumerate(line) if word == "--set"]
    overrides = dict(map(parse_assignment, words))
    overrides |= {"base.model": str(place.base), "output.folder": str(place.runs)}
    overrides |= {"output.name": name, "train.steps": STEPS}
    return TrainRequest(request=Request(dataset=place.dataset, overrides=overrides), resume=resume)


def signals_at(moment: Moment, *numbers: int) -> Callable[[Event], None]:
    """Return a listener that sends this process signals, once; handlers run in the main thread."""
    sent = []

    def listener(event: Event) -> None:
        if not sent and moment(event):
            sent.extend(numbers)
            for number in numbers:
                signal.raise_signal(number)

    return listener


@pytest.mark.parametrize(
    ("when", "number", "code"),
    [
        *((when, signal.SIGTERM, 143) for when in MOMENTS),
        ("in a step", signal.SIGINT, 130),
        ("in a step", signal.SIGHUP, 143),
    ],
)
def test_ckp_07_one_signal_saves_and_the_run_goes_on_to_the_same_bits(
    when: str, number: int, code: int, place: Toy
) -> None:
    moment, step = MOMENTS[when]
    name = f"{when}-{code}-{number}".replace(" ", "-")
    listener = Steps(signals_at(moment, number))
    with pytest.raises(StoppedBySignal) as stopped:
        train(asked(place, name), listeners=(listener,))
    run = place.runs / name
    assert stopped.value.exit_code == code
    assert (read_status(run).state, read_status(run).exit_code) == ("stopped", code)
    state = load_newest(run / "states", events=None)
    assert state is not None
    assert state.step in (step, step + 1), "at the end of the step in which it came"
    assert state.step == trajectory(run)[-1][0]
    train(asked(place, name, resume=True))
    assert trajectory(run) == trajectory(place.run)
    for file in ("adapter.safetensors", "optim.safetensors", "state.json"):
        assert (last_state(run) / file).read_bytes() == (last_state(place.run) / file).read_bytes()
    assert events(run, "validation") != []


class Steps:
    """Adds the step that is being worked on to the phases, which do not say it."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self.listener, self.step = listener, 0

    def __call__(self, event: Event) -> None:
        self.step = event.fields.get("step", self.step)
        fields = {**event.fields, "step": self.step}
        self.listener(Event(kind=event.kind, fields=fields, time_s=event.time_s))


def test_ckp_07_samples_do_not_hold_up_a_stop(place: Toy) -> None:
    listener = Steps(signals_at(MOMENTS["while sampling"][0], signal.SIGTERM))
    with pytest.raises(StoppedBySignal):
        train(
            asked(place, "unsampled", sampling__prompts=["a toy", "another"]), listeners=(listener,)
        )
    run = place.runs / "unsampled"
    assert [row["step"] for row in events(run, "sample")] == [0, 3]
    assert [image["prompt"] for image in events(run, "sample")[-1]["images"]] == ["a toy"]
    notes = [row["what"] for row in read_jsonl(run / "problems.jsonl")]
    assert "1 of 2 sample images at step 3: asked to stop" in notes
    assert any(note.startswith("asked to stop: finishing the step") for note in notes)


@pytest.mark.parametrize("done", [0, 1, 4])
def test_ckp_07_caching_stops_between_two_items_and_keeps_them(
    done: int, place: Toy, tmp_path: Path
) -> None:
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    moment: Moment = lambda event: phase(event, "cache") and event.fields["done"] == done  # noqa: E731
    with pytest.raises(StoppedBySignal, match=f"stopped while caching, {done} of ") as stopped:
        train(
            asked(place, f"cached-{done}", **cache),
            listeners=(signals_at(moment, signal.SIGTERM),),
        )
    assert stopped.value.exit_code == 143
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == done
    run = place.runs / f"cached-{done}"
    assert read_status(run).exit_code == 143
    train(asked(place, f"cached-{done}", resume=True, **cache))
    (cached,) = events(run, "cached")
    assert cached["found"] == done
    assert trajectory(run) == trajectory(place.run)


def test_ckp_07_copies_of_a_signal_are_one_and_handlers_are_given_back(place: Toy) -> None:
    """A terminal signals the whole group, and launchers forward it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    copies = signals_at(MOMENTS["in a step"][0], *[signal.SIGINT] * 5)
    with pytest.raises(StoppedBySignal):
        train(asked(place, "copies"), listeners=(copies,))
    assert last_state(place.runs / "copies").name == "step-00000003"
    assert [signal.getsignal(number) for number in numbers] == before
    assert not [t for t in threading.enumerate() if t.name == "lora-train-signals"]


def test_ckp_07_a_third_signal_quits_though_the_disk_does_not_answer(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save at step 4 hangs; three signals later the state of step 2 is what there is."""
    stuck, opened = threading.Event(), threading.Event()

    def write(folder: Path, state: Any, *, keep: int) -> Path:
        if state.step >= 4:
            stuck.set()
            opened.wait(60)
        return write_state(folder, state, keep=keep)

    monkeypatch.setattr(checkpoint_writer, "write_state", write)
    now_s = [0.0]
    monkeypatch.setattr(run_module, "StopFlag", partial(StopFlag, clock=lambda: now_s[0]))
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
        with pytest.raises(KeyboardInterrupt):
            train(asked(place, "third"), listeners=(answer,))
    finally:
        thread.join()
    run = place.runs / "third"
    state = load_newest(run / "states", events=None)
    assert state is not None
    assert state.step == 2
    opened.set()
    for writer in [t for t in threading.enumerate() if t.name == "lora-train-state-writer"]:
        writer.join()
    said = [row["what"] for row in read_jsonl(run / "problems.jsonl")]
    assert any(what.startswith("still saving; a third signal quits") for what in said)
    monkeypatch.undo()
    train(asked(place, "third", resume=True))
    assert trajectory(run) == trajectory(place.run)
