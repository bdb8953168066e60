"""The best step is kept, and training ends once the validation loss stops falling; a killed run agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.files import read_json_object
from lora_trainer.reporting.status import read_status
from tests.fakes.runs import Toy, contents, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

STEPS = 12
BEST: dict[str, Any] = {
    "output__keep_best": True,
    "output__save_every_steps": 4,
    "output__keep_states": 10,
    "output__keep_last": 20,
    "output__precision": "fp32",
    "train__validate_every_steps": 2,
    "train__ema_decay": 0.9,
    "optimizer__learning_rate": 0.1,
    "optimizer__schedule": "constant",
    "sampling__every_steps": 0,
    "logging__trackers": [],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run that keeps its best step and saves every fourth."""
    place = toy(tmp_path_factory.mktemp("best")).with_base()
    assert place.train(**BEST, steps=STEPS) == 0
    return place


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(run, "validation") if row["step"]}


def best_of(run: Path) -> tuple[int, dict[str, Any]]:
    """Return the step that best.json names and the tensors of the best file."""
    record = read_json_object(run / "best.json")
    assert record["file"] == f"{run.name}-best.safetensors"
    return record["step"], load_file(run / record["file"])


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[key] == expected[key]).all() for key in found
    )


def test_the_step_with_the_lowest_loss_is_kept_as_it_was(place: Toy) -> None:
    found = losses(place.run)
    step, tensors = best_of(place.run)
    assert step == min(found, key=lambda step: found[step]) < STEPS, "the run goes past its best"
    assert not same(tensors, load_file(place.run / "toy.safetensors"))
    # The same training, saved at that step, exports the same averaged weights.
    other = {**BEST, "output__save_every_steps": step}
    assert place.train("--name", "saved", **other, steps=STEPS) == 0
    expected = load_file(place.runs / "saved" / f"saved-step{step:08d}.safetensors")
    assert same(tensors, expected)


def test_without_it_nothing_changes_but_the_file(place: Toy) -> None:
    assert place.train("--name", "plain", **{**BEST, "output__keep_best": False}, steps=STEPS) == 0
    run = place.runs / "plain"
    assert not (run / "plain-best.safetensors").exists()
    assert trajectory(run) == trajectory(place.run)
    assert losses(run) == losses(place.run)


def test_a_run_that_goes_on_from_an_earlier_state_has_the_same_best(
    place: Toy, tmp_path: Path
) -> None:
    copied = place.copy(tmp_path / "runs")
    for state in (copied.run / "states").glob("step-*"):
        if state.name > "step-00000004":
            shutil.rmtree(state)
    (copied.run / "toy.safetensors").unlink()
    (copied.run / "toy-best.safetensors").write_bytes(b"of a step that is to come")
    (copied.run / "best.json").unlink()
    assert copied.train("--resume", **BEST, steps=STEPS) == 0
    (resumed,) = events(copied.run, "resumed")
    assert (resumed["step"], resumed["exactness"]) == (4, "EXACT"), resumed["differences"]
    step, tensors = best_of(copied.run)
    expected_step, expected = best_of(place.run)
    assert step == expected_step and same(tensors, expected)
    assert contents(last_state(copied.run)) == contents(last_state(place.run))


def test_a_run_killed_while_it_writes_its_best_goes_on_to_the_same_bits(place: Toy) -> None:
    line = place.arguments("--name", "killed", steps=STEPS, **BEST)
    point = ("lora_trainer.run.saving", "write_atomic", 1, False)
    done = python(DRIVER, json.dumps([[line, point]]))
    assert "-9" in done.stderr.split(), done.stderr[-2000:]
    run = place.runs / "killed"
    assert (run / "killed-best.safetensors").exists() and not (run / "best.json").exists()
    assert run_cli([*line, "--resume"]) == 0
    assert [row["exactness"] for row in events(run, "resumed")] == ["EXACT"]
    (step, tensors), (expected_step, expected) = best_of(run), best_of(place.run)
    assert step == expected_step and same(tensors, expected)
    assert contents(last_state(run)) == contents(last_state(place.run))


def test_turning_it_on_in_a_resume_is_refused(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = place.copy(tmp_path / "runs")
    changed = {**BEST, "output__keep_best": False}
    assert copied.train("--resume", **changed, steps=STEPS + 2) == 2
    assert "output.keep_best" in capsys.readouterr().err


@pytest.fixture(scope="module")
def early(place: Toy) -> Path:
    """A run of many steps that ends two validations after its best."""
    settings = {**BEST, "train__stop_after_validations": 2}
    assert place.train("--name", "early", **settings, steps=60) == 0
    return place.runs / "early"


def test_training_ends_well_once_the_loss_stops_falling(early: Path) -> None:
    found = losses(early)
    end = max(found)
    step, _ = best_of(early)
    assert end == step + 4 < 60, "two validations of two steps each"
    assert min(found[end], found[end - 2]) >= found[step]
    assert max(row["step"] for row in events(early, "step")) == end
    (finished,) = events(early, "finished")
    assert finished["step"] == end and f"lowest at step {step}" in finished["early"]
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
    settings = {**BEST, "train__stop_after_validations": 2}
    before = contents(last_state(run))
    assert copied.train("--name", "early", "--resume", **settings, steps=60) == 0
    assert contents(last_state(run)) == before
    assert trajectory(run) == trajectory(early)

    # From a state before the end it comes to the same end.
    newest = last_state(run)
    shutil.rmtree(newest)
    assert copied.train("--name", "early", "--resume", **settings, steps=60) == 0
    assert last_state(run) == newest and contents(newest) == before
    assert trajectory(run) == trajectory(early)

    # With more patience it goes on.
    more = {**settings, "train__stop_after_validations": 3}
    assert copied.train("--name", "early", "--resume", **more, steps=60) == 0
    assert max(losses(run)) > max(losses(early))


def test_the_plan_refuses_it_without_held_out_pictures_and_counts_the_kept_weights(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(place.dataset), "--base", str(place.base), "--json", "--set"]
    for setting in ("output.keep_best=true", "train.stop_after_validations=2"):
        for held_out in ("0", "0.1"):  # none, and too few
            assert run_cli([*line, setting, "--set", f"data.validation_fraction={held_out}"]) == 2
            assert setting.partition("=")[0] in capsys.readouterr().err
    peaks = []
    for word in ("false", "true"):
        capsys.readouterr()
        held_out = ["--set", "data.validation_fraction=0.2"]
        assert run_cli([*line, f"output.keep_best={word}", *held_out]) == 0
        plan = json.loads(capsys.readouterr().out)
        peaks.append({item["name"]: item["bytes"] for item in plan["memory"]["items"]})
    without, kept = peaks
    assert "best adapter" not in without
    assert kept["best adapter"] == kept["adapter weights"]
    assert kept["copies for saving"] > without["copies for saving"]
