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
from tests.fakes.cublas import Missing, without_layouts
from tests.fakes.runs import Toy, last_state, problems, toy, trajectory

INT8_PRODUCTS = "int8 by int8"
KINDS = (*QUANTIZATIONS, INT8_PRODUCTS)
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
    if kind == INT8_PRODUCTS:
        settings |= {"memory__base_precision": "int8", "memory__base_matmul": "int8"}
    name = name.replace(" ", "-")
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


def test_int8_products_do_not_depend_on_how_a_step_is_split(
    place: Toy, whole: Mapping[str, Path]
) -> None:
    """A row is rounded by itself: one image at once is the same run, up to the rounding of sums."""
    split = train(place, "split", INT8_PRODUCTS, memory__micro_batch=1, train__batch_size=4)
    together = train(place, "together", INT8_PRODUCTS, memory__micro_batch=4, train__batch_size=4)
    one, other = (load_file(last_state(run) / ADAPTER) for run in (split, together))
    difference = sum(float((one[key] - other[key]).square().sum()) for key in one) ** 0.5
    assert difference < 1e-3 * sum(float(value.square().sum()) for value in one.values()) ** 0.5


@pytest.mark.parametrize("missing", ["refused", "wrong", "everything"])
def test_a_card_whose_cublas_lacks_a_layout_trains_without_it_and_says_so(
    missing: Missing, place: Toy, whole: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an `_int_mm` that refuses what cuBLAS does not promise, the first step was the end of the run."""
    without_layouts(monkeypatch, missing)
    run = train(place, f"without-{missing}", INT8_PRODUCTS)
    found = trajectory(run)
    losses, others = ([loss for _, loss, *_ in each] for each in (found, trajectory(whole["int8"])))
    assert losses == (others if missing == "everything" else pytest.approx(others, rel=0.02))
    (said,) = (row for row in problems(run) if "int8 products" in row["what"])
    assert said["severity"] == ("warning" if missing == "everything" else "note")
    assert ("backward" in said["what"]) == (missing != "everything")
