"""Whole runs that train text encoders: some stop early, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.checkpoint.states import ADAPTER, FILES
from tests.fakes.runs import Toy, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
STOPPING: dict[str, Any] = {
    "adapter__text_encoder": True,
    "logging__trackers": [],
    "optimizer__learning_rate": 0.02,
    "optimizer__weight_decay": 0.5,
    "output__precision": "fp32",
    "train__batch_size": 2,
    "train__ema_decay": 0.9,
    "train__text_encoder_until": 0.5,
}
"""The text encoder's adapter stops after three of six steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run, and `killed`, which was killed between two saves."""
    place = toy(tmp_path_factory.mktemp("text")).with_base()
    assert place.train(**STOPPING) == 0
    point = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
    done = python(DRIVER, json.dumps([(command(place, "killed"), point)]), timeout_s=280)
    assert done.stderr.split()[-1] == "-9", done.stderr[-2000:]
    return place


def command(place: Toy, name: str, *more: str, **settings: Any) -> list[str]:
    return place.arguments("--name", name, *more, **{**STOPPING, **settings})


def state_of(run: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of each tensor of the adapter in a state."""
    tensors = load_file(run / "states" / f"step-{step:08d}" / ADAPTER)
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def same_states(one: Path, other: Path) -> bool:
    return all(
        (last_state(one) / file).read_bytes() == (last_state(other) / file).read_bytes()
        for file in FILES
    )


def test_text_encoders_stay_as_they_are_after_the_stop(place: Toy) -> None:
    at_four, at_six = state_of(place.run, 4), state_of(place.run, 6)
    changed = {name.partition(".")[0] for name in at_six if at_six[name] != at_four[name]}
    assert changed == {"denoiser", "average"}, "averages go on to what the weights became"
    assert any(name.startswith("text_encoder.") for name in at_six)


def test_a_run_killed_after_the_stop_goes_on_to_the_same_bits(place: Toy) -> None:
    assert run_cli(command(place, "killed", "--resume")) == 0
    killed = place.runs / "killed"
    (resumed,) = events(killed, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 2), resumed["differences"]
    assert trajectory(killed) == trajectory(place.run)
    assert same_states(killed, place.run)


def test_a_run_that_never_stops_learns_something_else(place: Toy) -> None:
    assert run_cli(command(place, "whole", train__text_encoder_until=1.0)) == 0
    stopped, whole = trajectory(place.run), trajectory(place.runs / "whole")
    assert whole[:3] == stopped[:3]
    assert whole[4][1] != stopped[4][1], "the loss of the fifth step"


def test_something_must_be_left_to_train(place: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = {"optimizer__learning_rate_pattern": {"denoiser|down_blocks|up_blocks|mid_block": 0.0}}
    assert run_cli(command(place, "frozen", **frozen)) == 2
    assert "nothing is left to train" in capsys.readouterr().err
