"""Whole runs with every option of the objective on: killed, resumed, split, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_trainer.checkpoint.states import ADAPTER, FILES
from tests.fakes.runs import Toy, contents, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
EVERYTHING: dict[str, Any] = {
    "adapter__dropout": 0.1,
    "adapter__rank_dropout": 0.1,
    "adapter__module_dropout": 0.1,
    "logging__trackers": [],
    "objective__input_perturbation": 0.1,
    "objective__loss": "huber",
    "objective__multires_noise_iterations": 2,
    "objective__noise_offset": 0.05,
    "objective__timestep_sampling": "mode",
    "objective__timestep_strata": 4,
    "objective__weighting": "soft_min_snr",
    "optimizer__learning_rate": 0.02,
    "optimizer__max_weight_norm": 0.05,
    "output__precision": "fp32",
    "train__batch_size": 2,
    "train__ema_decay": 0.9,
    "train__validate_every_steps": 2,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run, and `killed`, which was killed between two saves."""
    place = toy(tmp_path_factory.mktemp("craft")).with_base()
    assert place.train(**EVERYTHING) == 0
    point = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
    done = python(DRIVER, json.dumps([(command(place, "killed"), point)]), timeout_s=280)
    assert done.stderr.split()[-1] == "-9", done.stderr[-2000:]
    return place


def command(place: Toy, name: str, *more: str, **settings: Any) -> list[str]:
    return place.arguments("--name", name, *more, **{**EVERYTHING, **settings})


def exported(run: Path) -> dict[str, Any]:
    return load_file(run / f"{run.name}.safetensors")


def saved(run: Path, prefix: str) -> dict[str, Any]:
    """Return the adapter in a run's last state by key of the exported file."""
    found = load_file(last_state(run) / ADAPTER)
    sides = {"down": "lora_down.weight", "up": "lora_up.weight"}
    names = {}
    for name, tensor in found.items():
        if name.startswith(f"{prefix}denoiser."):
            module, _, side = name.removeprefix(f"{prefix}denoiser.").rpartition(".")
            names[f"lora_unet_{module.replace('.', '_')}.{sides[side]}"] = tensor
    return names


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[key].ravel(), other[key].ravel()) for key in other)


def test_a_killed_run_goes_on_to_the_same_bits(place: Toy) -> None:
    killed, whole = place.runs / "killed", place.run
    assert not (killed / "killed.safetensors").exists()
    assert run_cli(command(place, "killed", "--resume")) == 0
    (resumed,) = events(killed, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 2), resumed["differences"]
    for file in FILES:
        assert (last_state(killed) / file).read_bytes() == (last_state(whole) / file).read_bytes()
    assert trajectory(killed) == trajectory(whole)
    assert [row["loss"] for row in events(killed, "validation")] == [
        row["loss"] for row in events(whole, "validation")
    ]
    assert contents(killed / "samples") == contents(whole / "samples")
    assert same_tensors(exported(killed), exported(whole))


def test_the_split_of_a_step_changes_rounding_alone(place: Toy) -> None:
    assert run_cli(command(place, "split", memory__micro_batch=1)) == 0
    one, other = (
        np.concatenate([tensor.ravel() for _, tensor in sorted(saved(run, prefix).items())])
        for run, prefix in ((place.runs / "split", "average."), (place.run, "average."))
    )
    assert np.linalg.norm(one - other) < 1e-4 * np.linalg.norm(other)


def test_the_average_is_exported_or_what_was_trained(place: Toy) -> None:
    """The other one of a finished run takes a resume, which trains nothing."""
    assert run_cli(command(place, "other")) == 0
    run = place.runs / "other"
    trained, averaged = saved(run, ""), saved(run, "average.")
    assert not same_tensors(trained, averaged) and len(averaged) == len(trained) > 0
    assert same_tensors(exported(run), averaged)
    steps = len(events(run, "step"))
    assert run_cli(command(place, "other", "--resume", output__weights="trained")) == 0
    assert same_tensors(exported(run), trained)
    assert events(run, "resumed")[-1]["exactness"] == "EXACT"
    assert len(events(run, "step")) == steps


def test_what_is_validated_is_what_is_exported(place: Toy) -> None:
    assert run_cli(command(place, "trained", output__weights="trained")) == 0
    run = place.runs / "trained"
    assert trajectory(run) == trajectory(place.run), "what is shown changes no training"
    shown, averaged = ([row["loss"] for row in events(at, "validation")] for at in (run, place.run))
    assert shown[0] == averaged[0], "the base"
    assert shown[-1] != averaged[-1]
    assert contents(run / "samples") != contents(place.run / "samples")


def test_no_update_is_larger_than_the_limit(place: Toy) -> None:
    tensors = saved(place.run, "")
    norms = []
    for name, down in tensors.items():
        if name.endswith("lora_down.weight"):
            up = tensors[name.replace("lora_down", "lora_up")]
            norms.append(np.linalg.norm(up.reshape(len(up), -1) @ down.reshape(len(down), -1)))
    assert max(norms) == pytest.approx(0.05, rel=1e-4), "some reach it"


def test_the_file_says_how_it_was_trained(place: Toy) -> None:
    with safe_open(place.run / "toy.safetensors", framework="numpy") as file:
        header = file.metadata()
    expected = {
        "ss_loss_type": "huber",
        "ss_ip_noise_gamma": "0.1",
        "ss_scale_weight_norms": "0.05",
        "ss_network_dropout": "0.1",
        "ss_noise_offset": "0.05",
    }
    assert {key: header[key] for key in expected} == expected


def test_an_average_cannot_be_asked_for_half_way(place: Toy) -> None:
    assert run_cli(command(place, "killed", "--resume", train__ema_decay=None)) == 2
