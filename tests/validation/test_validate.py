"""`validate` on a real run of a tiny base: every part or a reason, and nothing written where it must not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.common.files import read_json_object
from lora_trainer.evaluate import evaluation
from lora_trainer.evaluate import validate as validate_module
from lora_trainer.reporting.score import WEIGHTS
from tests.fakes.runs import Toy, events, listing, run_cli, toy

QUIET: dict[str, Any] = {
    "sampling__every_steps": 0,
    "output__save_every_steps": 0,
    "logging__trackers": [],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run of twelve steps, two images of eight held out."""
    place = toy(tmp_path_factory.mktemp("validate"), images=8).with_base()
    more = {"data__validation_fraction": 0.25, "optimizer__learning_rate": 1e-2}
    assert place.train(**QUIET, **more, steps=12) == 0
    return place


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer timesteps, samples and steps: the numbers are rough, what is made of them is not."""
    monkeypatch.setattr(evaluation, "QUANTILES", 4)
    monkeypatch.setattr(evaluation, "SAMPLE_STEPS", 2)
    monkeypatch.setattr(validate_module, "SAMPLES", 3)


def validate(place: Toy, path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    line = ["validate", str(path), str(place.dataset), "--json", "--set", "hardware.threads=1"]
    assert run_cli([*line, *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def measured(place: Toy) -> dict[str, Any]:
    """What the end of the run wrote."""
    return read_json_object(place.run / "validation.json")


def test_every_run_ends_with_what_costs_nothing(place: Toy, measured: dict[str, Any]) -> None:
    assert measured["parts"].keys() == {"gain", "weights", "rank"}
    assert measured["left_out"].keys() == WEIGHTS.keys() - measured["parts"].keys()
    assert not measured["complete"] and measured["weight_left_out"] == pytest.approx(0.57)
    (event,) = events(place.run, "measured")
    assert (event["step"], event["parts"]) == (12, measured["parts"])
    base, last = (events(place.run, "validation")[index]["loss"] for index in (0, -1))
    assert (measured["figures"]["gain"] > 0) == (last < base)


def test_a_run_is_measured_part_by_part_into_its_report(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(place.dataset)
    found = validate(place, place.run, capsys)
    assert listing(place.dataset) == before
    assert found["parts"].keys() | found["left_out"].keys() == WEIGHTS.keys()
    assert found["parts"].keys() >= {"gain", "weights", "strength", "generalisation", "drift"}
    assert found == read_json_object(place.run / "validation.json")
    assert all(0 <= value <= 1 for value in found["parts"].values())
    assert 0 <= found["score"] <= 1
    assert found["figures"]["pictures"] == 2, "the images held out in training"
    (strengths, losses) = zip(*found["figures"]["loss_by_strength"], strict=True)
    assert strengths == (0, 0.5, 1, 1.5) and len(set(losses)) == 4
    page = (place.run / "report.html").read_text(encoding="utf-8")
    assert "generalisation" in page and f"score {found['score']:.2f}" in page
    assert validate(place, place.run, capsys) == found, "every number is drawn by counter"


def test_a_file_alone_says_what_it_assumes_and_gets_the_same_losses(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = validate(place, place.run, capsys)
    file = tmp_path / "mine.safetensors"
    file.write_bytes((place.run / "toy.safetensors").read_bytes())
    base = ("--base", str(place.base))
    found = validate(place, file, capsys, *base)
    assert found["figures"]["gain"] == pytest.approx(run["figures"]["gain"], abs=1e-4)
    assert any("assumed to be the unchanged" in note for note in found["notes"])
    assert list(tmp_path.iterdir()) == [file]

    save_file(load_file(file), file)  # another trainer's: nothing in its header
    stranger = validate(place, file, capsys, *base)
    assert "all count as held out" in " ".join(stranger["notes"])
    assert {"generalisation", "memorisation"} <= stranger["left_out"].keys()
    assert stranger["figures"]["pictures"] == 8


def test_without_a_base_or_with_another_dataset_it_is_said(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(load_file(place.run / "toy.safetensors"), file)
    assert run_cli(["validate", str(file), str(place.dataset)]) == 2
    assert "--base" in capsys.readouterr().err
    other = toy(tmp_path, images=6)
    found = validate(other, place.run, capsys)
    assert any("changed since the training" in note for note in found["notes"])


def test_numbers_that_are_not_finite_are_worth_nothing(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(place.run / "toy.safetensors")
    next(value for key, value in tensors.items() if "lora_up" in key).fill_(torch.nan)
    file = tmp_path / "nan.safetensors"
    save_file(tensors, file)
    found = validate(place, file, capsys, "--base", str(place.base))
    assert (found["score"], found["parts"]["weights"]) == (0, 0)
    assert "NaN or infinity" in found["left_out"]["gain"]


def test_a_stronger_file_has_larger_norms_and_drifts_further(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(place.run / "toy.safetensors")
    base = ("--base", str(place.base))
    found = []
    for factor in (1.0, 20.0):
        file = tmp_path / f"{factor:g}.safetensors"
        save_file({k: v * (factor if "lora_up" in k else 1) for k, v in tensors.items()}, file)
        found.append(validate(place, file, capsys, *base))
    weak, strong = found
    assert strong["figures"]["relative_norm"]["mean"] == pytest.approx(
        20 * weak["figures"]["relative_norm"]["mean"], rel=1e-2
    )
    assert strong["figures"]["drift"] > 2 * weak["figures"]["drift"]
    assert strong["parts"]["drift"] < weak["parts"]["drift"]


def test_the_end_of_a_run_is_not_measured_where_it_is_not_asked_for(place: Toy) -> None:
    assert place.train("--name", "plain", **QUIET, output__measure=False, steps=1) == 0
    assert not (place.runs / "plain" / "validation.json").exists()
    assert events(place.runs / "plain", "measured") == []
