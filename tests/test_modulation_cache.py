"""Whole runs with modulation made ahead: the numbers of runs without; the same bits when interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lora_trainer import families
from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS
from lora_trainer.common.errors import MachineError
from lora_trainer.network.modulation import ModulatedNetwork
from lora_trainer.training import loop
from lora_trainer.training.training import Model
from tests.fakes.family_bases import base_of, facts_at, side_of
from tests.fakes.runs import (
    Toy,
    events,
    last_state,
    toy,
    trajectory,
    write_priors,
)

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
NAMES = [name for name in families.MODULES if families.family(name).modulation]
SETTINGS: Mapping[str, Any] = {
    "output__precision": "fp32",
    "optimizer__learning_rate": 5e-3,
    "train__batch_size": 3,
    "train__validate_every_steps": 2,
    "sampling__every_steps": 4,
}


@pytest.fixture(scope="module", params=NAMES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A dataset and a base of the family."""
    made = toy(tmp_path_factory.mktemp("modulation"))
    shutil.copytree(base_of(request.param), made.base)
    return made


def train(place: Toy, name: str, *more: str, cached: bool = True, **settings: Any) -> Path:
    side_px = side_of(facts_at(place.base))
    chosen = {**SETTINGS, "data__resolution": side_px, "memory__modulation_cache": cached}
    assert place.train("--name", name, *more, **{**chosen, **settings}) in (0, 4)
    return place.runs / name


def same_result(one: Path, other: Path) -> None:
    assert trajectory(one) == trajectory(other)
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        first, second = load_file(last_state(one) / file), load_file(last_state(other) / file)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), file


def close_result(one: Path, other: Path) -> None:
    """The same up to rounding: products on a CPU depend on where in memory the weights begin."""
    for left, right in zip(trajectory(one), trajectory(other), strict=True):
        assert left == pytest.approx(right, rel=1e-5)
    first, second = load_file(last_state(one) / ADAPTER), load_file(last_state(other) / ADAPTER)
    assert first.keys() == second.keys()
    difference = sum(float((first[key] - second[key]).abs().sum()) for key in first)
    assert difference < 1e-4 * sum(float(first[key].abs().sum()) for key in first)


def validations(run: Path) -> list[list[float]]:
    """Return the loss of each validation and of each of its timesteps."""
    return [
        [row["loss"], *(loss for pair in row["by_timestep"] for loss in pair)]
        for row in events(run, "validation")
    ]


def pixels(image: Path) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(image), dtype=np.int16)


@pytest.fixture(autouse=True)
def longer_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers as narrow as these a sixteenth would be two samples."""
    monkeypatch.setattr("lora_trainer.planning.weight_bytes.VECTORS_SHARE", 2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of each time that outputs were made ahead, and -1 for each single one."""
    seen: list[int] = []
    outputs, output = ModulatedNetwork.outputs, ModulatedNetwork.output

    def counted(network: ModulatedNetwork, inputs: Any) -> Any:
        seen.append(sum(map(len, inputs)))
        return outputs(network, inputs)

    def single(network: ModulatedNetwork, *given: Any) -> Any:
        seen.append(-1)
        return output(network, *given)

    monkeypatch.setattr(ModulatedNetwork, "outputs", counted)
    monkeypatch.setattr(ModulatedNetwork, "output", single)
    return seen


def test_losses_validations_samples_and_weights_are_the_same(place: Toy, made: list[int]) -> None:
    plain = train(place, "plain", cached=False)
    assert not made
    cached = train(place, "cached")
    close_result(cached, plain)
    assert len(events(plain, "validation")) > 2
    for one, other in zip(validations(cached), validations(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    images = list((plain / "samples").rglob("*.png"))
    assert images
    for image in images:
        twin = cached / image.relative_to(plain)
        assert np.abs(pixels(twin) - pixels(image)).max() <= 1
    assert 6 <= max(made) < 18, "no window of several steps, or one for all"


def test_an_interrupted_run_goes_on_within_a_window_to_the_same_bits(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(place, "whole")
    real, calls = loop._report, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MachineError("the plug was pulled", fix="put it back")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_report", failing)
        broken = train(place, "broken")
    assert len(trajectory(broken)) == 3
    same_result(train(place, "broken", "--resume"), whole)


def test_a_batch_in_parts_and_priors_are_the_same_as_without(place: Toy, made: list[int]) -> None:
    """Two and one at once, some of them twice and some to stay as the base says; dropout keyed by sample."""
    priors = write_priors(place) if not (place.dataset / "masks").exists() else {}
    settings = {**priors, "memory__micro_batch": 2, "adapter__dropout": 0.1}
    settings |= {"memory__gradient_checkpointing": "full", "sampling__every_steps": 0}
    plain = train(place, "plain-priors", cached=False, **settings)
    assert not made
    cached = train(place, "cached-priors", **settings)
    close_result(cached, plain)
    assert made and -1 not in made, "weights came for a single pass of training"
    steps = len(trajectory(cached))
    assert len(made) < 2 * steps + len(validations(cached)) * 8
    apart = train(place, "apart", **{**settings, "memory__micro_batch": 1})
    for one, other in zip(trajectory(apart), trajectory(cached), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_full_device_splits_the_batch_and_the_window_follows(
    place: Toy, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Model.losses_of

    def failing(model: Model, batch: Any) -> Any:
        if len(batch.samples) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, batch)

    apart = train(place, "one", memory__micro_batch=1, sampling__every_steps=0)
    made.clear()
    monkeypatch.setattr(Model, "losses_of", failing)
    relieved = train(place, "relieved", sampling__every_steps=0)
    assert trajectory(relieved) == trajectory(apart)
    assert -1 not in made and len(made) < 20
