"""CKP-05, 06, 08 and 09: whole runs that go on from any state, copied, renamed, damaged, at any clock.

Every damage to every file of a state is in tests/checkpoint/test_states.py.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.fakes.plans import planned
from tests.fakes.runs import (
    Toy,
    contents,
    events,
    last_state,
    run_cli,
    same_tensors,
    toy,
    trajectory,
)

STEPS = 5
SETTINGS: dict[str, Any] = {
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
    "logging__trackers": [],
    "output__save_every_steps": 1,
    "output__keep_states": 10,
    "train__batch_size": 3,
    "memory__micro_batch": 2,
}
"""Five images, three a step in parts of two and one: epochs end within steps 2 and 4 and at step 5."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """An uninterrupted run with a state of every step."""
    place = toy(tmp_path_factory.mktemp("resume")).with_base()
    assert place.train(steps=STEPS, **SETTINGS) == 0
    return place


@pytest.fixture
def copied(place: Toy, tmp_path: Path) -> Toy:
    return place.copy(tmp_path / "runs")


def forget_after(run: Path, step: int) -> None:
    """Leave the run as a kill right after that step's save would have."""
    for state in (run / "states").glob("step-*"):
        if int(state.name[5:]) > step:
            shutil.rmtree(state)
    (run / f"{run.name}.safetensors").unlink()


def assert_same_end(run: Path, whole: Path) -> None:
    state, expected = last_state(run), last_state(whole)
    assert state.name == expected.name
    assert contents(state) == contents(expected)
    assert trajectory(run) == trajectory(whole)
    files = (load_file(each / f"{each.name}.safetensors") for each in (run, whole))
    assert same_tensors(*files)


def test_ckp_08_a_run_goes_on_from_any_step_to_the_same_bits(place: Toy, copied: Toy) -> None:
    """At the end of an epoch, within one and twice in a row; a finished run has nothing to do."""
    for step in (2, 3):
        forget_after(copied.run, step)
        assert copied.train("--resume", steps=STEPS, **SETTINGS) == 0
        assert_same_end(copied.run, place.run)
    finished = len(events(copied.run, "finished"))
    assert copied.train("--resume", steps=STEPS, **SETTINGS) == 0
    assert_same_end(copied.run, place.run)
    assert len(events(copied.run, "finished")) == finished
    resumed = [(row["exactness"], row["step"]) for row in events(copied.run, "resumed")]
    assert resumed == [("EXACT", 2), ("EXACT", 3), ("EXACT", STEPS)]
    assert [path.name for path in copied.runs.iterdir()] == ["toy"], "no second run"


def test_ckp_05_damaged_states_are_moved_aside_and_the_run_ends_with_the_same_bits(
    place: Toy, copied: Toy
) -> None:
    draw = random.Random(3)
    states = copied.run / "states"
    for state in sorted(states.glob("step-*"))[-3:]:
        file = draw.choice(sorted(path for path in state.iterdir() if path.stat().st_size > 2))
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 255
        file.write_bytes(data)
    assert copied.train("--resume", steps=STEPS, **SETTINGS) == 0
    assert_same_end(copied.run, place.run)
    assert len(list(states.glob("bad-step-*"))) == 3
    (resumed,) = events(copied.run, "resumed")
    assert resumed["step"] == STEPS - 3


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
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest state is the one of the highest step, whatever files and clock say."""
    moved = tmp_path / "elsewhere" / "another name \u00fc"
    shutil.copytree(place.run, moved)
    (moved / "toy.safetensors").rename(moved / f"{moved.name}.safetensors")
    forget_after(moved, 3)
    draw = random.Random(9)
    for path in [moved, *moved.rglob("*")]:
        when_s = draw.choice((0, 10**9, 4 * 10**9))
        os.utime(path, (when_s, when_s))
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() - 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 10**18)
    assert run_cli([str(place.dataset), "--resume-from", str(moved)]) == 0
    assert_same_end(moved, place.run)
    assert (moved / f"{moved.name}.safetensors").is_file()
    (resumed,) = events(moved, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 3)
