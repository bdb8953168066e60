"""The best step is kept; a killed run agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.files import read_json_object
from tests.fakes.runs import (
    Toy,
    assert_same_run,
    events,
    run_cli,
    run_killed,
    same_tensors,
    toy,
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


def test_a_run_killed_while_it_writes_its_best_goes_on_to_the_same_bits(place: Toy) -> None:
    line = place.arguments("--name", "killed", steps=STEPS, **BEST)
    run_killed([(line, ("lora_trainer.run.saving", "write_atomic", 1, False))])
    run = place.runs / "killed"
    assert (run / "killed-best.safetensors").exists() and not (run / "best.json").exists()
    assert run_cli([*line, "--resume"]) == 0
    assert [row["exactness"] for row in events(run, "resumed")] == ["EXACT"]
    assert_same_run(run, place.run)
    steps = [read_json_object(each / "best.json")["step"] for each in (run, place.run)]
    assert steps[0] == steps[1]


def test_the_plan_refuses_it_without_held_out_pictures_and_counts_the_kept_weights(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(place.dataset), "--base", "embedded", "--json", "--set"]
    # Too few are held out, as by 0.
    assert run_cli([*line, "output.keep_best=true", "--set", "data.validation_fraction=0.1"]) == 2
    assert "output.keep_best needs" in capsys.readouterr().err
    held_out = ["--set", "data.validation_fraction=0.2"]
    assert run_cli([*line, "output.keep_best=true", *held_out]) == 0
    items = json.loads(capsys.readouterr().out)["memory"]["items"]
    sizes = {item["name"]: item["bytes"] for item in items}
    assert sizes["best adapter"] == sizes["adapter weights"] > 0
