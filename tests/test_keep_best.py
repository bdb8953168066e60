"""The best step is kept, and training ends once the validation loss stops falling; kills: test_options_end_to_end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.files import read_json_object
from lora_trainer.reporting.status import read_status
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

STEPS = 12
BEST: dict[str, Any] = {
    "output__keep_best": True,
    "output__save_every_steps": 2,
    "output__keep_states": 10,
    "output__keep_last": 20,
    "output__precision": "fp32",
    "train__validate_every_steps": 2,
    "train__ema_decay": 0.9,
    "optimizer__learning_rate": 0.1,
    "optimizer__schedule": "constant",
    "optimizer__warmup_fraction": 0.0,
    "sampling__every_steps": 0,
    "logging__trackers": [],
}
EARLY = {**BEST, "output__keep_best": False, "train__stop_after_validations": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run that keeps its best step and saves every second."""
    place = toy(tmp_path_factory.mktemp("best")).with_base()
    assert place.train(**BEST, steps=STEPS) == 0
    return place


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(run, "validation") if row["step"]}


def test_the_step_with_the_lowest_loss_is_kept_as_it_was(place: Toy) -> None:
    by_step = losses(place.run)
    record = read_json_object(place.run / "best.json")
    best = min(by_step, key=lambda step: by_step[step])
    assert (record["step"], record["file"]) == (best, "toy-best.safetensors")
    assert best < STEPS, "the run goes past its best"
    tensors = load_file(place.run / "toy-best.safetensors")
    assert same_tensors(tensors, load_file(place.run / f"toy-step{best:08d}.safetensors"))
    assert not same_tensors(tensors, load_file(place.run / "toy.safetensors"))


@pytest.fixture(scope="module")
def early(place: Toy) -> Path:
    """A run of many steps that ends two validations after its best, which it does not keep."""
    assert place.train("--name", "early", **EARLY, steps=60) == 0
    return place.runs / "early"


def test_training_ends_well_once_the_loss_stops_falling(early: Path, place: Toy) -> None:
    by_step = losses(early)
    end = max(by_step)
    best = min(by_step, key=lambda step: by_step[step])
    assert end == best + 4 < 60, "two validations of two steps each"
    assert trajectory(early)[-1][0] == end
    both = min(end, STEPS)
    assert trajectory(early)[:both] == trajectory(place.run)[:both], "keeping the best trains alike"
    assert not (early / "early-best.safetensors").exists()
    (finished,) = events(early, "finished")
    assert finished["step"] == end and f"lowest at step {best}" in finished["early"]
    assert (early / "early.safetensors").exists()
    assert last_state(early).name == f"step-{end:08d}"
    status = read_status(early)
    assert status is not None
    assert (status.state, status.exit_code) == ("finished", 0)
    assert "finished early" in status.message
    assert "ended early" in (early / "report.html").read_text(encoding="utf-8")


def test_a_resume_agrees_that_it_has_ended(early: Path, place: Toy, tmp_path: Path) -> None:
    copied = place.copy(tmp_path / "runs")
    run = copied.runs / "early"
    newest, before = last_state(run), contents(last_state(run))
    for is_torn in (False, True):  # then from a state before the end it comes to the same end
        if is_torn:
            shutil.rmtree(newest)
        assert copied.train("--name", "early", "--resume", **EARLY, steps=60) == 0
        assert last_state(run) == newest and contents(newest) == before
        assert trajectory(run) == trajectory(early)

    # With more patience it goes on.
    more = {**EARLY, "train__stop_after_validations": 3}
    assert copied.train("--name", "early", "--resume", **more, steps=60) == 0
    assert max(losses(run)) > max(losses(early))


def test_the_plan_refuses_it_without_held_out_pictures_and_counts_the_kept_weights(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(place.dataset), "--base", "embedded", "--json", "--set"]
    for setting in ("output.keep_best=true", "train.stop_after_validations=2"):
        # Too few are held out, as by 0.
        assert run_cli([*line, setting, "--set", "data.validation_fraction=0.1"]) == 2
        assert setting.partition("=")[0] in capsys.readouterr().err
    capsys.readouterr()
    held_out = ["--set", "data.validation_fraction=0.2"]
    assert run_cli([*line, "output.keep_best=true", *held_out]) == 0
    items = json.loads(capsys.readouterr().out)["memory"]["items"]
    sizes = {item["name"]: item["bytes"] for item in items}
    assert sizes["best adapter"] == sizes["adapter weights"] > 0
