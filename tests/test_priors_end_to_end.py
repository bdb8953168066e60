"""Whole runs with masks, priors, an average and dropout at once: killed, resumed, split, and each in force."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.checkpoint.states import ADAPTER, FILES
from lora_trainer.common.events import read_jsonl
from tests.fakes.runs import (
    Toy,
    events,
    last_state,
    python,
    run_cli,
    toy,
    trajectory,
    write_priors,
)
from tests.fakes.training import distance
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
COMBINED: Mapping[str, Any] = {
    "adapter__dropout": 0.1,
    "data__caption_dropout": 0.1,
    "data__flip": True,
    "data__more_resolutions": [24],
    "logging__trackers": [],
    "objective__min_snr_gamma": 5.0,
    "optimizer__learning_rate": 0.02,
    "sampling__every_steps": 0,
    "train__batch_size": 4,
    "memory__micro_batch": 4,
    "train__ema_decay": 0.9,
    "train__validate_every_steps": 2,
}
KILLS = {
    "caching": ("lora_trainer.cache.store", "Cache.write", 3, False),
    "step": ("lora_trainer.training.training", "Model.losses_of", 30, True),
    "saving": ("lora_trainer.checkpoint.writer", "freeze", 3, False),
}
"""The first of all in a mask, the second in a step, the third between two states."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run, and one killed at each point; the one killed while caching has its own cache."""
    place = toy(tmp_path_factory.mktemp("priors")).with_base()
    priors = write_priors(place)
    (place.folder / "priors.json").write_text(json.dumps(priors))
    assert place.train(**settings(place)) == 0
    work = [(command(place, name), point) for name, point in KILLS.items()]
    done = python(DRIVER, json.dumps(work), timeout_s=280)
    codes = [word for word in done.stderr.split() if word.lstrip("-").isdigit()]
    assert codes == ["-9"] * len(work), done.stderr[-2000:]
    return place


def settings(place: Toy, **changes: Any) -> dict[str, Any]:
    priors = json.loads((place.folder / "priors.json").read_text())
    return {**COMBINED, **priors, **changes}


def command(place: Toy, name: str, *more: str, **changes: Any) -> list[str]:
    if name == "caching":
        changes["data__cache_dir"] = str(place.folder / "cache of its own")
    return place.arguments("--name", name, *more, **settings(place, **changes))


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy) -> None:
    run, whole = place.runs / name, place.run
    assert not (run / f"{name}.safetensors").exists()
    assert run_cli(command(place, name, "--resume")) == 0
    (resumed,) = events(run, "resumed")
    assert resumed["exactness"] == "EXACT", resumed["differences"]
    for file in FILES:
        assert (last_state(run) / file).read_bytes() == (last_state(whole) / file).read_bytes()
    assert trajectory(run) == trajectory(whole)
    assert [row["loss"] for row in events(run, "validation")] == [
        row["loss"] for row in events(whole, "validation")
    ]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_split_of_a_step_changes_rounding_alone(place: Toy, micro_batch: int) -> None:
    from safetensors.torch import load_file

    name = f"split-{micro_batch}"
    assert run_cli(command(place, name, memory__micro_batch=micro_batch)) == 0
    one, other = (load_file(last_state(run) / ADAPTER) for run in (place.runs / name, place.run))
    keys = sorted(other)
    assert distance([one[key] for key in keys], [other[key] for key in keys]) < 1e-4


OFF: Mapping[str, Mapping[str, Any]] = {
    "masks": {"data__masks": "none"},
    "background": {"data__mask_background": 0.7},
    "prior": {"objective__prior": "images"},
    "prior weight": {"objective__prior_weight": 0.4},
    "ratio": {"data__regularisation_ratio": 0.2},
    "regularisation": {"data__regularisation_dir": None, "objective__prior": "images"},
    "preservation": {"objective__preservation_weight": 0.0},
    "preservation weight": {"objective__preservation_weight": 0.25},
    "class word": {"data__class_word": "object"},
}


@pytest.mark.parametrize("name", OFF)
def test_each_setting_is_in_force(name: str, place: Toy) -> None:
    assert run_cli(command(place, name, output__save_every_steps=0, **OFF[name])) == 0
    assert trajectory(place.runs / name) != trajectory(place.run)


def test_what_the_steps_measure_is_a_function_of_the_settings(place: Toy) -> None:
    assert run_cli(command(place, "again", output__save_every_steps=0)) == 0
    assert trajectory(place.runs / "again") == trajectory(place.run)


def test_the_run_says_what_is_trained(place: Toy) -> None:
    record = json.loads((place.run / "run.json").read_bytes())
    assert record["dataset"]["images"] == 6, "what is learned"
    assert record["plan"]["time"]["regularisation_per_epoch"] == 4, "0.7 of five"
    assert record["plan"]["time"]["epochs"] == pytest.approx(6 * 4 / 9)
    (started,) = events(place.run, "run_started")
    assert (started["images"], started["regularisation_images"]) == (5, 3)
    items = record["plan"]["memory"]["by_phase"]["training"]
    assert "base's prediction" in {item["name"] for item in items}
    problems = [row["what"] for row in read_jsonl(place.run / "problems.jsonl")]
    assert (
        "4 of 6 images have no mask, all of them counts: p2.png, p3.png, p4.png, p5.png" in problems
    )


def test_the_file_says_so_too(place: Toy) -> None:
    from safetensors import safe_open

    with safe_open(place.run / "toy.safetensors", framework="numpy") as file:
        header = file.metadata()
    assert (header["ss_num_train_images"], header["ss_num_reg_images"]) == ("5", "4")
    assert header["ss_prior_loss_weight"] == "0.8"


def test_a_bad_mask_ends_the_run_before_it_begins(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = shutil.copytree(place.dataset, tmp_path / "toy")
    Image.new("L", (40, 40), 0).save(dataset / "p3-masklabel.png")
    line = command(place, "bad", data__max_bad_fraction=1.0)
    line[0] = str(dataset)
    assert run_cli(line) == 3
    assert "masks cannot be used: p3-masklabel.png is black everywhere" in capsys.readouterr().err
    assert not (place.runs / "bad").exists()
    assert run_cli(["check", str(dataset), "--set", "data.masks=files", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [row["file"] for row in found if row["kind"] == "bad-mask"] == ["p3-masklabel.png"]


def test_nothing_is_written_into_the_folders(place: Toy) -> None:
    names = {
        path.name
        for folder in (place.dataset, place.folder / "others")
        for path in folder.rglob("*")
    }
    assert all(name.endswith((".png", ".txt")) or name == "masks" for name in names), names
