"""Promise 2: a run that was killed, stopped, copied or damaged goes on by the same command to the same bits.

SIGKILL at any instant, signals that save first, resumes of resumes: CKP-05 to CKP-09 of the fault list. The killed
runs happen in forks (`run_killed`); they are resumed here. Every damage to every file of a state is in
tests/checkpoint/test_states.py, every operation of a save in tests/reliability/test_ckp_sweep.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_trainer.checkpoint import writer as checkpoint_writer
from lora_trainer.checkpoint.states import write_state
from lora_trainer.common.event_kinds import Event
from lora_trainer.reporting.status import read_status
from tests.fakes.plans import planned
from tests.fakes.runs import (
    QUIET,
    Point,
    Toy,
    assert_same_run,
    events,
    heard_by,
    last_state,
    problems,
    run_cli,
    run_killed,
    toy,
    trajectory,
)

pytestmark = pytest.mark.timeout(300)  # a loaded machine is not a failure


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run."""
    place = toy(tmp_path_factory.mktemp("kill")).with_base()
    assert place.train(logging__trackers=[]) == 0
    return place


# ---- kills


def at(where: str, call: int, *, after: bool = False) -> Point:
    module, _, name = where.partition(":")
    return f"lora_trainer.{module}", name, call, after


# A run saves at steps 2, 4 and 6; a state is five files, a rename and a prune.
KILLS: Mapping[str, Mapping[int | None, Point]] = {
    "while caching": {None: at("cache.store:Cache.write", 5)},
    "before the first save": {None: at("training.loop:judge_step", 1, after=True)},
    "in a state's files, and again": {
        2: at("checkpoint.states:write_file", 8),
        4: at("checkpoint.states:rename_durably", 2),
    },
    "before the final export": {6: at("run.saving:write_export", 3)},
    "in the report": {6: at("run.lead:write_report", 1)},
}
"""Newest state after a kill -> its place; a second one kills the resumed run."""


def command(place: Toy, name: str) -> list[str]:
    """Return the command of a run of that name; the one killed while caching has its own cache."""
    cache = place.folder / "cache of its own" if name == "while caching" else place.cache
    named = ("--name", name.replace(" ", "-"))
    return place.arguments(*named, data__cache_dir=str(cache), logging__trackers=[])


@pytest.fixture(scope="module")
def killed(place: Toy) -> Toy:
    """All killed runs, each in the folder of its name."""
    work = []
    for name, points in KILLS.items():
        line = command(place, name)
        for point in points.values():
            work.append((line, point))
            line = [*line, "--resume"]
    run_killed(work)
    return place


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy, killed: Toy) -> None:
    run, left = killed.runs / name.replace(" ", "-"), list(KILLS[name])
    states = [int(path.name[5:]) for path in (run / "states").glob("step-*")]
    assert max(states, default=None) == left[-1], "the kill came when it should"
    assert not (run / f"{run.name}.safetensors").exists() or name == "in the report"

    assert run_cli([*command(place, name), "--resume"]) == 0

    resumed = [(row["exactness"], row["step"]) for row in events(run, "resumed")]
    assert resumed == [("EXACT", step or 0) for step in left]
    assert_same_run(run, place.run)
    assert [row["step"] for row in events(run, "sample")] == [0, 3, 6]
    assert len(list((run / "states").glob("step-*"))) == 2
    assert not list((run / "states").glob(".*")), "leftovers are cleaned up"
    assert len(events(run, "finished")) == 1


# ---- resumes of any state

SETTINGS: dict[str, Any] = {
    **QUIET,
    "output__save_every_steps": 1,
    "output__keep_states": 10,
    "train__batch_size": 3,
    "memory__micro_batch": 2,
}
"""Five images, three a step in parts of two and one: epochs end within steps 2 and 4 and at step 5."""
STEPS = 5


@pytest.fixture(scope="module")
def whole(place: Toy) -> Path:
    """An uninterrupted run with a state of every step."""
    assert place.train("--name", "whole", steps=STEPS, **SETTINGS) == 0
    return place.runs / "whole"


def forget_after(run: Path, step: int) -> None:
    """Leave the run as a kill right after that step's save would have."""
    for state in (run / "states").glob("step-*"):
        if int(state.name[5:]) > step:
            shutil.rmtree(state)
    (run / f"{run.name}.safetensors").unlink()


def test_ckp_05_08_a_run_goes_on_from_any_step_to_the_same_bits(
    whole: Path, place: Toy, tmp_path: Path
) -> None:
    """At the end of an epoch, and within one, newer states being damaged; a finished run has nothing to do."""
    copied = place.copy(tmp_path / "runs")
    run, named = copied.runs / "whole", ("--name", "whole", "--resume")
    forget_after(run, 2)
    assert copied.train(*named, steps=STEPS, **SETTINGS) == 0
    assert_same_run(run, whole)
    draw = random.Random(3)
    for state in sorted((run / "states").glob("step-*"))[-2:]:
        file = draw.choice(sorted(path for path in state.iterdir() if path.stat().st_size > 2))
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 255
        file.write_bytes(data)
    for _ in range(2):
        assert copied.train(*named, steps=STEPS, **SETTINGS) == 0
        assert_same_run(run, whole)
        assert len(events(run, "finished")) == 1
    assert len(list((run / "states").glob("bad-step-*"))) == 2
    resumed = [(row["exactness"], row["step"]) for row in events(run, "resumed")]
    assert resumed == [("EXACT", 2), ("EXACT", 3), ("EXACT", STEPS)]
    assert not list(copied.runs.glob("whole-*")), "no second run"


def test_ckp_06_the_disk_is_asked_for_one_state_more_than_is_kept_which_are_two(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [
        planned(overrides={"output.keep_states": count}).disk_bytes["states"] for count in (2, 3)
    ]
    one = kept[1] - kept[0]
    assert kept[0] == 3 * one > 0
    assert place.train("--name", "one", **SETTINGS | {"output__keep_states": 1}) == 2
    assert "output.keep_states=1" in capsys.readouterr().err


def test_ckp_09_a_run_copied_renamed_and_with_shuffled_times_goes_on_at_any_clock(
    whole: Path, place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest state is the one of the highest step, whatever files and clock say."""
    moved = tmp_path / "elsewhere" / "another name \u00fc"
    shutil.copytree(whole, moved)
    (moved / "whole.safetensors").rename(moved / f"{moved.name}.safetensors")
    forget_after(moved, 3)
    draw = random.Random(9)
    for path in [moved, *moved.rglob("*")]:
        when_s = draw.choice((0, 10**9, 4 * 10**9))
        os.utime(path, (when_s, when_s))
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() - 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 10**18)
    assert run_cli([str(place.dataset), "--resume-from", str(moved)]) == 0
    assert_same_run(moved, whole)
    assert (moved / f"{moved.name}.safetensors").is_file()
    (resumed,) = events(moved, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 3)


# ---- CKP-07: signals. The first saves and ends, at any moment; copies of it count once; the third quits

Moment = Callable[[Event], bool]
MOMENTS: dict[str, tuple[int, int, Moment, int]] = {
    "while saving": (
        signal.SIGHUP,
        143,
        lambda event: event.kind == "saved" and event.fields["step"] == 2,
        3,
    ),
    "before the first step": (signal.SIGINT, 130, lambda event: phase(event, "train"), 1),
}
"""The signal, the exit code, when it comes, and the first step at which the run may end."""


def phase(event: Event, name: str) -> bool:
    return event.kind == "phase" and event.fields["phase"] == name


@pytest.fixture
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


@pytest.mark.usefixtures("a_terminal_that_can_be_closed")
@pytest.mark.parametrize("when", MOMENTS)
def test_ckp_07_one_signal_saves_whole_steps_and_copies_of_it_count_once(
    when: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal signals the whole group, and launchers forward it."""
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
        if frozen.step >= 4:
            stuck.set()
            opened.wait(60)
        return write_state(folder, frozen, keep=keep)

    monkeypatch.setattr(checkpoint_writer, "write_state", write)
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("lora_trainer.reporting.control.time", clock)
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
