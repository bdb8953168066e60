"""TRN-01, 03 and 04: not-a-number at any moment, samples that fail, overflows of fp16; no run is lost.

The trainings are real ones on the tiny base; what goes wrong is put in between. Their number is small
here and larger where RELIABILITY_INJECTIONS says so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.common.events import read_jsonl
from lora_trainer.run.samples import SampleAction
from lora_trainer.training import loop
from lora_trainer.training.loss import Model
from tests.fakes.runs import STEPS, Toy, events, toy, trajectory
from tests.fakes.training import at_start, build_feeder, build_training

INJECTIONS = int(os.environ.get("RELIABILITY_INJECTIONS", "1"))
Figure = Callable[..., None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run, at four images a step so that there is something to halve."""
    place = toy(tmp_path_factory.mktemp("trn")).with_base()
    assert train(place, "toy") == 0
    return place


def train(place: Toy, name: str, *more: str, **settings: Any) -> int:
    chosen = {"logging__trackers": [], "train__batch_size": 4, "sampling__every_steps": 0}
    return place.train("--name", name, *more, **{**chosen, **settings})


@dataclass
class Fault:
    """Spoils calls of a function: those whose number, from 1 on, is in `at`."""

    real: Callable[..., Any]
    at: frozenset[int]
    spoil: Callable[[Any], Any]
    calls: int = 0
    hits: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls not in self.at:
            return self.real(*args, **options)
        self.hits.append(self.calls)
        return self.spoil(self.real(*args, **options))


def nan(losses: Tensor) -> Tensor:
    return losses * torch.nan


# ---- TRN-01


@pytest.mark.parametrize("number", range(INJECTIONS))
def test_trn_01_not_a_number_anywhere_loses_no_run_and_is_never_saved(
    number: int, tmp_path_factory: pytest.TempPathFactory, place: Toy, figure: Figure
) -> None:
    """Up to eleven spoilt steps, in rows of up to six: skipped, or gone back from."""
    draw = random.Random(number)
    rows = [(draw.randint(1, 10), draw.randint(1, 6)) for _ in range(draw.randint(1, 2))]
    at = frozenset(call for first, length in rows for call in range(first, first + length))
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(Model.losses_of, at, nan)
        patch.setattr(Model, "losses_of", lambda *args: fault(*args))
        name = f"nan-{number}"
        assert train(place, name, train__validate_every_steps=0, memory__micro_batch=4) == 0
    run = place.runs / name
    assert fault.hits
    assert [row["step"] for row in events(run, "step")] == list(range(1, STEPS + 1))
    problems = [row for row in read_jsonl(run / "problems.jsonl") if row["code"] == "TRN-01"]
    assert problems
    files = [run / f"{name}.safetensors", *run.glob("states/*/*.safetensors")]
    assert_finite(*files)
    figure("injections", tried=1, lost=0, nan_files=0)


def assert_finite(*files: Path) -> None:
    for file in files:
        for tensor in load_file(file).values():
            assert tensor.double().isfinite().all(), file


# ---- TRN-03


def test_trn_03_samples_that_fail_are_a_problem_and_nothing_else(place: Toy) -> None:
    """For lack of memory, also one by one, and then for another reason."""
    errors = iter([torch.OutOfMemoryError("CUDA out of memory")] * 2 + [KeyError("x")] * 2)

    def fail(*_: object) -> Any:
        raise next(errors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleAction, "_write", fail)
        assert train(place, "samples", sampling__every_steps=3) == 0
    run = place.runs / "samples"
    problems = [row for row in read_jsonl(run / "problems.jsonl") if row["code"] == "TRN-03"]
    assert [problem["what"].split(":")[0] for problem in problems] == [
        "the sample images of step 0 was skipped",
        "no sample images at step 3",
        "no sample images at step 6",
    ]
    assert trajectory(run) == trajectory(place.run), "and the weights are the exact ones again"


# ---- TRN-04


def test_trn_04_fp16_overflows_advance_neither_the_optimizer_nor_the_row(tmp_path: Path) -> None:
    """Every third step overflows: the loss scale falls, the schedule goes by steps, nothing is lost."""
    tiny = build_training(build_feeder(batch_size=2), steps=9, precision=torch.float16)
    scaler = tiny.training.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    fault = Fault(tiny.training.model.losses_of, frozenset({3, 6, 9}), lambda losses: losses * 1e38)
    model = tiny.training.model
    spoilt = _Faulty(**vars(model), fault=fault)
    loop.run(replace(tiny.training, model=spoilt), at_start(micro_batch=2))
    overflows = [row for row in tiny.of_kind("change") if row["key"] == "loss scale"]
    assert len(overflows) == len(fault.hits) > 0
    counts = {float(state["step"]) for state in tiny.training.optimizer.state.values()}
    assert counts == {9.0 - len(fault.hits)}
    assert [row["step"] for row in tiny.of_kind("step")] == list(range(1, 10))
    assert [row["lr"] for row in tiny.of_kind("step")] == [
        tiny.training.learning_rate(step) for step in range(9)
    ]


@dataclass(frozen=True, kw_only=True)
class _Faulty(Model):
    fault: Fault

    def losses_of(self, batch: Any) -> Tensor:
        losses: Tensor = self.fault(batch)
        return losses
