"""Whole runs whose frozen base is kept in few bits: interrupted, resumed, exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS
from lora_trainer.common.errors import MachineError
from lora_trainer.config.choices import QUANTIZATIONS
from lora_trainer.training import loop
from tests.fakes.runs import Toy, last_state, toy, trajectory

KINDS = QUANTIZATIONS
pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("quantized")).with_base()


@pytest.fixture(scope="module")
def whole(place: Toy) -> Mapping[str, Path]:
    """Return the folder of an uninterrupted run by precision."""
    return {kind: train(place, f"{kind}-whole", kind) for kind in ("fp32", *KINDS)}


def train(place: Toy, name: str, kind: str, *more: str, **settings: object) -> Path:
    settings["memory__base_precision"] = kind
    place.train("--name", name, *more, output__precision="fp32", **settings)
    return place.runs / name


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_quantises_again_and_goes_on_to_the_same_bits(
    kind: str, place: Toy, whole: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = loop.judge_step, 0

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MachineError("the plug was pulled", fix="put it back")
        return real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "judge_step", failing)
        broken = train(place, f"{kind}-broken", kind)
    assert len(trajectory(broken)) == 3
    resumed = train(place, f"{kind}-broken", kind, "--resume")
    assert trajectory(resumed) == trajectory(whole[kind])
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        one, other = (
            load_file(last_state(whole[kind]) / file),
            load_file(last_state(resumed) / file),
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), file


def test_few_bits_change_the_run_a_little_and_every_kind_in_its_own_way(
    whole: Mapping[str, Path],
) -> None:
    """A setting that nothing reads would leave all runs alike."""
    losses = {kind: [loss for _, loss, *_ in trajectory(run)] for kind, run in whole.items()}
    assert len({tuple(values) for values in losses.values()}) == 1 + len(KINDS)
    for values in losses.values():
        assert values == pytest.approx(losses["fp32"], rel=0.02)
