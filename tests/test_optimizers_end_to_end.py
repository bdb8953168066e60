"""Whole runs with every optimizer: killed and resumed to the same bits, exported as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_trainer.checkpoint.states import ADAPTER, FILES
from lora_trainer.config.declare import SCHEDULE_FREE
from lora_trainer.lora_file.write import best_export_name
from lora_trainer.planning.optimizer_facts import OPTIMIZERS
from tests.fakes.runs import Toy, contents, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
NAMES = [name for name in OPTIMIZERS if "adamw" not in name or name == SCHEDULE_FREE]
"""AdamW's own are those of tests/test_resume_kill.py and tests/reliability."""
SHARED: dict[str, Any] = {
    "adapter__targets": "all",  # convolutions too, which Muon leaves to AdamW
    "logging__trackers": [],
    "optimizer__lora_plus_ratio": 2.0,
    "output__keep_best": True,
    "output__precision": "fp32",
    "train__validate_every_steps": 2,
}


def command(place: Toy, optimizer: str, *more: str, name: str = "", **settings: Any) -> list[str]:
    chosen = {**SHARED, "optimizer__name": optimizer, **settings}
    if optimizer == "prodigy":
        del chosen["optimizer__lora_plus_ratio"]
    return place.arguments("--name", name or optimizer, *more, **chosen)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """One whole run with each, and one that was killed between two saves."""
    place = toy(tmp_path_factory.mktemp("optimizers")).with_base()
    for name in NAMES:
        assert run_cli(command(place, name)) == 0
    point = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
    work = [(command(place, name, name=f"{name}-killed"), point) for name in NAMES]
    done = python(DRIVER, json.dumps(work), timeout_s=280)
    codes = [line for line in done.stderr.split() if line.lstrip("-").isdigit()]
    assert codes == ["-9"] * len(work), done.stderr[-2000:]
    return place


def exported(run: Path) -> dict[str, Any]:
    return load_file(run / f"{run.name}.safetensors")


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy) -> None:
    whole, killed = place.runs / name, place.runs / f"{name}-killed"
    assert not (killed / f"{killed.name}.safetensors").exists()
    assert run_cli(command(place, name, "--resume", name=f"{name}-killed")) == 0
    (resumed,) = events(killed, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 2), resumed["differences"]
    for file in FILES:
        assert (last_state(killed) / file).read_bytes() == (last_state(whole) / file).read_bytes()
    assert trajectory(killed) == trajectory(whole)
    losses = [[row["loss"] for row in events(run, "validation")] for run in (killed, whole)]
    assert losses[0] == losses[1]
    assert contents(killed / "samples") == contents(whole / "samples")
    assert same_tensors(exported(killed), exported(whole))


def test_the_file_says_which_it_was(place: Toy) -> None:
    for name in NAMES:
        with safe_open(place.runs / name / f"{name}.safetensors", framework="np") as file:
            assert file.metadata()["ss_optimizer"].startswith(f"{name}(")


def test_the_rate_that_is_logged_is_the_one_prodigy_has_found(place: Toy) -> None:
    rates = [row["lr"] for row in events(place.runs / "prodigy", "step")]
    assert 0 < max(rates) < 0.1, "its factor is 1"


def test_schedule_free_exports_its_average_and_saves_what_it_trains(place: Toy) -> None:
    run = place.runs / SCHEDULE_FREE
    saved = load_file(last_state(run) / ADAPTER)
    trained = {
        f"lora_unet_{name.removeprefix('denoiser.').removesuffix('.up').replace('.', '_')}": tensor
        for name, tensor in saved.items()
        if name.startswith("denoiser.") and name.endswith(".up")
    }
    file = exported(run)
    pairs = [(file[f"{name}.lora_up.weight"].ravel(), up.ravel()) for name, up in trained.items()]
    assert len(pairs) > 10
    assert all(not np.array_equal(average, up) for average, up in pairs)
    assert all(np.linalg.norm(average) < np.linalg.norm(up) for average, up in pairs)


def test_looking_at_schedule_free_more_often_changes_no_bit(place: Toy) -> None:
    """The way from the average back to the weights must not round them."""
    often = {"sampling__every_steps": 1, "train__validate_every_steps": 1}
    assert run_cli(command(place, SCHEDULE_FREE, name="often", **often)) == 0
    for file in (ADAPTER, FILES[1]):
        one, other = (last_state(place.runs / name) / file for name in ("often", SCHEDULE_FREE))
        assert one.read_bytes() == other.read_bytes()


def test_the_best_step_of_schedule_free_is_its_average_then(place: Toy) -> None:
    """The last step is the best of so few: the file then holds what the final export does."""
    run = place.runs / SCHEDULE_FREE
    losses = {row["step"]: row["loss"] for row in events(run, "validation")}
    assert min(losses, key=lambda step: losses[step]) == 6, losses
    assert same_tensors(load_file(run / best_export_name(run.name)), exported(run))


def test_another_optimizer_cannot_take_over(place: Toy) -> None:
    line = command(place, "lion", "--resume", optimizer__name="came")
    assert run_cli(line) == 2
