"""`validate` on a real run of a tiny base: every part or a reason, and nothing written where it must not be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.common.files import read_json_object
from lora_trainer.evaluate import evaluation
from lora_trainer.evaluate import validate as validate_module
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
    more["output__measure"] = True
    assert place.train(**QUIET, **more, steps=12) == 0
    return place


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Fewer timesteps, samples and steps: the numbers are rough, what is made of them is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "QUANTILES", 4)
        patch.setattr(evaluation, "SAMPLE_STEPS", 2)
        patch.setattr(validate_module, "SAMPLES", 3)
        yield


def validate(place: Toy, path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    line = ["validate", str(path), str(place.dataset), "--json", "--set", "hardware.threads=1"]
    assert run_cli([*line, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_run_ends_with_what_costs_nothing(place: Toy) -> None:
    measured = read_json_object(place.run / "validation.json")
    assert measured["parts"].keys() == {"gain", "weights", "rank"}
    assert measured["left_out"].keys() == validate_module.WEIGHTS.keys() - measured["parts"].keys()
    assert not measured["complete"] and measured["weight_left_out"] == pytest.approx(0.57)
    (event,) = events(place.run, "measured")
    assert (event["step"], event["parts"]) == (12, measured["parts"])
    base, last = (events(place.run, "validation")[index]["loss"] for index in (0, -1))
    assert (measured["figures"]["gain"] > 0) == (last < base)
    (learned,) = events(place.run, "image_losses")
    images = learned["images"]
    assert learned["levels"] == 2, "8 images of a short run"
    assert [each["image"] for each in images] == sorted(
        file.name for file in place.dataset.glob("*.png")
    )
    assert sum(each["held_out"] for each in images) == 2
    assert all(0 < each["lora"] != each["base"] for each in images), "with the LoRA and without it"
    assert any(each["other_caption"] != each["lora"] for each in images)


def test_a_run_and_its_file_alone_are_measured_part_by_part(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(place.dataset)
    run = validate(place, place.run, capsys)
    assert listing(place.dataset) == before
    assert run["parts"].keys() | run["left_out"].keys() == validate_module.WEIGHTS.keys()
    assert run["parts"].keys() >= {"gain", "weights", "strength", "generalisation", "drift"}
    assert run == read_json_object(place.run / "validation.json")
    assert all(0 <= value <= 1 for value in (*run["parts"].values(), run["score"]))
    assert run["figures"]["pictures"] == 2, "the images held out in training"
    (strengths, losses) = zip(*run["figures"]["loss_by_strength"], strict=True)
    assert strengths == (0, 0.5, 1, 1.5) and len(set(losses)) == 4
    page = (place.run / "report.html").read_text(encoding="utf-8")
    assert "generalisation" in page and f"score {run['score']:.2f}" in page

    file = tmp_path / "mine.safetensors"
    file.write_bytes((place.run / "toy.safetensors").read_bytes())
    alone = validate(place, file, capsys, "--base", str(place.base))
    assert alone["figures"]["gain"] == pytest.approx(run["figures"]["gain"], abs=1e-4)
    assert alone["figures"]["drift"] == run["figures"]["drift"], "every number is drawn by counter"
    assert any("assumed to be the unchanged" in note for note in alone["notes"])
    assert list(tmp_path.iterdir()) == [file]


def test_a_stronger_file_of_another_trainer_drifts_further(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in its header says how it was trained."""
    tensors, file = load_file(place.run / "toy.safetensors"), tmp_path / "mine.safetensors"
    save_file(tensors, file)
    assert run_cli(["validate", str(file), str(place.dataset)]) == 2
    assert "--base" in capsys.readouterr().err
    weak, strong, spoilt = (
        validate(place, changed(file, tensors, factor), capsys, "--base", str(place.base))
        for factor in (1.0, 20.0, torch.nan)
    )
    assert "all count as held out" in " ".join(weak["notes"])
    assert {"generalisation", "memorisation"} <= weak["left_out"].keys()
    assert weak["figures"]["pictures"] == 8
    assert strong["figures"]["relative_norm"]["mean"] == pytest.approx(
        20 * weak["figures"]["relative_norm"]["mean"], rel=1e-2
    )
    assert strong["figures"]["drift"] > 2 * weak["figures"]["drift"]
    assert strong["parts"]["drift"] < weak["parts"]["drift"]
    assert (spoilt["score"], spoilt["parts"]["weights"]) == (0, 0)
    assert "NaN or infinity" in spoilt["left_out"]["gain"]


def changed(file: Path, tensors: dict[str, torch.Tensor], factor: float) -> Path:
    save_file({k: v * (factor if "lora_up" in k else 1) for k, v in tensors.items()}, file)
    return file


def test_another_dataset_is_said_and_a_run_may_end_unmeasured(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = validate(toy(tmp_path, images=6), place.run, capsys)
    assert any("changed since the training" in note for note in other["notes"])
    assert place.train("--name", "plain", **QUIET, output__measure=False, steps=1) == 0
    assert not (place.runs / "plain" / "validation.json").exists()
    assert events(place.runs / "plain", "measured") == []
    assert events(place.runs / "plain", "image_losses") == []
