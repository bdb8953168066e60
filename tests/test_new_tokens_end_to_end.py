"""Whole runs with new tokens and several resolutions: killed, resumed, split, exported, drawn, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from lora_trainer.checkpoint.states import ADAPTER, FILES
from lora_trainer.lora_file.inspect import inspect_file
from tests.fakes.bases import sdxl
from tests.fakes.family_bases import base_of, facts_of, side_of
from tests.fakes.runs import Toy, contents, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
LEARNING: dict[str, Any] = {
    "adapter__new_tokens": 2,
    "adapter__new_tokens_from": "legs",
    "data__more_resolutions": [24],
    "data__trigger": "toy",
    "logging__trackers": [],
    "optimizer__learning_rate": 0.02,
    "optimizer__new_tokens_learning_rate": 0.05,
    "optimizer__weight_decay": 0.5,
    "output__precision": "fp32",
    "train__batch_size": 2,
    "train__ema_decay": 0.9,
    "train__new_tokens_until": 0.67,
}
"""The new tokens stop after four of six steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run, and `killed`, which was killed between two saves."""
    place = toy(tmp_path_factory.mktemp("words")).with_base()
    assert place.train(**LEARNING) == 0
    point = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
    done = python(DRIVER, json.dumps([(command(place, "killed"), point)]), timeout_s=280)
    assert done.stderr.split()[-1] == "-9", done.stderr[-2000:]
    return place


def command(place: Toy, name: str, *more: str, **settings: Any) -> list[str]:
    return place.arguments("--name", name, *more, **{**LEARNING, **settings})


def words_of(run: Path, step: int, prefix: str = "") -> dict[str, Any]:
    """Return the new tokens in a state by component."""
    tensors = load_file(run / "states" / f"step-{step:08d}" / ADAPTER)
    start = f"{prefix}new_tokens."
    return {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}


def numbers(run: Path) -> Any:
    tensors = load_file(last_state(run) / ADAPTER)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def embedding(run: Path) -> Path:
    return run / "embeddings" / f"{run.name}_emb.safetensors"


def pixels(file: Path) -> Any:
    return np.asarray(Image.open(file), np.int16)


def apart(one: Path, other: Path) -> int:
    return int(np.abs(pixels(one) - pixels(other)).max())


def test_a_killed_run_goes_on_to_the_same_bits(place: Toy) -> None:
    assert run_cli(command(place, "killed", "--resume")) == 0
    killed, whole = place.runs / "killed", place.run
    (resumed,) = events(killed, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 2), resumed["differences"]
    for file in FILES:
        assert (last_state(killed) / file).read_bytes() == (last_state(whole) / file).read_bytes()
    assert trajectory(killed) == trajectory(whole)
    assert contents(killed / "samples") == contents(whole / "samples")
    one, other = load_file(embedding(killed)), load_file(embedding(whole))
    assert all(np.array_equal(one[key], other[key]) for key in other)


def test_new_tokens_are_learned_until_they_stop(place: Toy) -> None:
    assert run_cli(command(place, "longer", train__new_tokens_until=1.0)) == 0
    stopped, longer = (
        words_of(run, 6)["text_encoder"] for run in (place.run, place.runs / "longer")
    )
    assert np.array_equal(stopped, words_of(place.run, 4)["text_encoder"])
    assert np.array_equal(stopped, words_of(place.runs / "longer", 4)["text_encoder"])
    assert not np.array_equal(stopped, longer)


def test_what_is_exported_are_the_vectors_of_the_average(place: Toy) -> None:
    (values,) = load_file(embedding(place.run)).values()
    assert np.array_equal(values, words_of(place.run, 6, "average.")["text_encoder"])
    assert not np.array_equal(values, words_of(place.run, 6)["text_encoder"])
    rolling = {path.name for path in (place.run / "embeddings").iterdir()}
    exports = {path.stem for path in place.run.glob("*.safetensors")}
    assert rolling == {f"{stem}_emb.safetensors" for stem in exports}


def test_the_split_of_a_step_changes_rounding_alone(place: Toy) -> None:
    assert run_cli(command(place, "split", memory__micro_batch=1)) == 0
    one, other = (numbers(run) for run in (place.runs / "split", place.run))
    assert np.linalg.norm(one - other) < 1e-4 * np.linalg.norm(other)


def test_every_resolution_is_cached_and_trained(place: Toy) -> None:
    assert run_cli(command(place, "single", data__more_resolutions=[])) == 0
    both, single = (
        json.loads((run / "run.json").read_text()) for run in (place.run, place.runs / "single")
    )
    (cached,) = events(place.run, "cached")
    assert cached["latents"] == 5 * 2 + 1, "one is held out"
    at_once = [set(record["plan"]["memory"]["images_at_once"]) for record in (single, both)]
    assert at_once[0] < at_once[1]
    assert trajectory(place.run) != trajectory(place.runs / "single")
    first, second = (
        events(run, "validation")[0]["loss"] for run in (place.run, place.runs / "single")
    )
    assert first == second, "validation is at data.resolution"


def test_the_file_draws_in_diffusers_what_the_trainer_showed(place: Toy, tmp_path: Path) -> None:
    assert drawn(place.run, tmp_path) <= 2
    shown = place.run / "samples"
    assert apart(shown / "step-00000000" / "00.png", shown / "step-00000006" / "00.png") > 10


def drawn(run: Path, folder: Path) -> int:
    """Return how far `sample` is from the trainer's last image of the same prompt and seed."""
    assert run_cli(["sample", str(run), "--prompt", "a toy", "--output", str(folder)]) == 0
    return apart(folder / f"{run.name}-1234.png", run / "samples" / "step-00000006" / "00.png")


def test_an_adapter_without_its_tokens_is_not_drawn_with(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "toy.safetensors"
    alone.write_bytes((place.run / alone.name).read_bytes())
    assert run_cli(["sample", str(alone), "--prompt", "a toy", "--base", str(place.base)]) == 3
    assert "toy_emb.safetensors" in capsys.readouterr().err


def test_inspect_names_the_tokens(place: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = inspect_file(place.run / "toy.safetensors")
    assert [problem.kind for problem in adapter.problems] == ["needs-embedding"]
    found = inspect_file(embedding(place.run))
    assert (found.kinds, found.embeddings) == (("embedding",), {"emb_params": (2, 16)})
    assert "'toy'" in found.problems[0].what
    assert run_cli(["inspect", str(embedding(place.run))]) == 0
    assert "2 new tokens of 16 numbers" in capsys.readouterr().out


def test_both_encoders_of_sdxl_learn_the_word(tmp_path: Path) -> None:
    place, side_px = toy(tmp_path), side_of(facts_of("sdxl"))
    sdxl.write_base(place.base)
    settings = {
        **LEARNING,
        "adapter__text_encoder": True,
        "data__resolution": side_px,
        "data__more_resolutions": [2 * side_px],
        "train__ema_decay": None,
        "train__text_encoder_until": 0.5,
    }
    assert place.train(**settings) == 0
    vectors = load_file(embedding(place.run))
    assert {key: values.shape for key, values in vectors.items()} == {
        "clip_l": (2, 8),
        "clip_g": (2, 12),
    }
    assert drawn(place.run, tmp_path / "drawn") <= 2


@pytest.mark.parametrize(
    ("settings", "base", "found"),
    [
        ({"data.trigger": None}, "sd15", "which is empty: choose a trigger word"),
        ({"train.init_from": "x.safetensors"}, "sd15", "starts new vectors"),
        ({}, "sd3", "cannot learn new tokens"),
        (
            {"adapter.new_tokens": 0, "adapter.new_tokens_from": "cat"},
            "sd15",
            "without effect while adapter.new_tokens is 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    settings: dict[str, Any],
    base: str,
    found: str,
    place: Toy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = {"adapter.new_tokens": 1, "data.trigger": "toy", **settings}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in chosen.items()]
    line = [str(place.dataset), "--base", str(base_of(base)), "--dry-run", *sets]
    assert run_cli(line) == 2
    assert found in capsys.readouterr().err
