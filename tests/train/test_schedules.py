"""Schedules: each is a function of the step number, has its own course, and says what it cannot do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.declare import ScheduleName
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.training import schedules

NAMES = get_args(ScheduleName)
TORCH = "torch.optim.lr_scheduler"


def rates(
    schedule: str, steps: int, warmup: float, rate: float = 2e-4, **values: Any
) -> list[float]:
    chosen = OptimizerSettings.model_validate(
        {"learning_rate": rate, "schedule": schedule, "warmup_fraction": warmup, **values}
    )
    formula = schedules.learning_rate(chosen, steps=steps)
    found = [formula(step) for step in range(steps)]
    # A resumed run asks for step k without having asked for the steps before.
    resumed = schedules.learning_rate(chosen, steps=steps)
    assert [resumed(step) for step in reversed(range(steps))] == found[::-1]
    return found


@example(schedule="cosine", steps=1, warmup=0.9, rate=1.0)
@example(schedule="linear", steps=4, warmup=0.9, rate=1.0)
@example(schedule="one_cycle", steps=1, warmup=0.0, rate=1.0)
@example(schedule="warmup_stable_decay", steps=1, warmup=0.9, rate=1.0)
@given(
    schedule=st.sampled_from(NAMES),
    steps=st.integers(1, 400),
    warmup=st.floats(0.0, 0.9),
    rate=st.floats(1e-6, 1.0),
)
def test_every_step_trains_and_the_peak_is_the_setting(
    schedule: str, steps: int, warmup: float, rate: float
) -> None:
    found = rates(schedule, steps, warmup, rate)
    peak = found.index(max(found))
    assert min(found) > 0
    assert max(found) == pytest.approx(rate, rel=1e-9)
    assert all(a < b for a, b in pairwise(found[: peak + 1])), "it rises to the peak"
    assert all(a >= b for a, b in pairwise(found[peak:])), "and never again after it"


def test_each_schedule_has_its_own_course() -> None:
    for schedule in ("linear", "cosine", "polynomial", "cosine_with_restarts"):
        found = rates(schedule, 200, 0.1)
        assert found[20] == pytest.approx(2e-4) and found[-1] < 0.02 * 2e-4
        assert found[20 + 90] / 2e-4 == pytest.approx(0.5, abs=0.01)
    linear, cosine = rates("linear", 100, 0.0), rates("cosine", 100, 0.0)
    assert cosine[25] > 1.1 * linear[25] and cosine[75] < 0.7 * linear[75]
    constant = rates("constant", 100, 0.1)
    assert constant == pytest.approx([2e-4 * min(1, (step + 1) / 11) for step in range(100)])
    stable = rates("warmup_stable_decay", 200, 0.1, decay_fraction=0.25)
    assert set(stable[20:150]) == {2e-4} and stable[175] == pytest.approx(1e-4, rel=0.05)
    squared = rates("polynomial", 200, 0.0, schedule_power=2.0)
    straight = rates("polynomial", 200, 0.0)
    assert squared[100] / 2e-4 == pytest.approx((straight[100] / 2e-4) ** 2)
    three = rates("cosine_with_restarts", 300, 0.0, schedule_cycles=3)
    falls = [step for step, (a, b) in enumerate(pairwise(three), start=1) if b > a]
    assert falls == [100, 200] and three[100] > 0.99 * 2e-4 and three[99] < 0.01 * 2e-4
    cycle = rates("one_cycle", 200, 0.3)
    assert cycle.index(max(cycle)) == 60 and 2e-4 / 25 < cycle[0] < 2e-4 / 20
    assert cycle[-1] < 1e-3 * 2e-4


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (f"{TORCH}:ExponentialLR", {"gamma": 0.98}),
        (f"{TORCH}:CosineAnnealingLR", {}),
        (f"{TORCH}:CosineAnnealingWarmRestarts", {"T_0": 13, "T_mult": 2}),
        (f"{TORCH}:MultiStepLR", {"milestones": [10, 40], "gamma": 0.1}),
        (f"{TORCH}:CyclicLR", {"base_lr": 1e-5, "max_lr": 2e-4, "cycle_momentum": False}),
        ("transformers:get_inverse_sqrt_schedule", {"num_warmup_steps": 5}),
        ("transformers:get_cosine_with_min_lr_schedule_with_warmup", {"min_lr_rate": 0.1}),
    ],
)
def test_a_schedule_given_by_its_path_is_what_its_library_computes(
    path: str, options: Mapping[str, Any]
) -> None:
    found = rates(path, 60, 0.0, schedule_options=options)
    module, _, name = path.partition(":")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-4)
    lacking = {"CosineAnnealingLR": {"T_max": 60}}.get(name, {})
    if name.startswith("get_cosine"):
        lacking = {"num_training_steps": 60, "num_warmup_steps": 0}
    scheduler = getattr(importlib.import_module(module), name)(optimizer, **lacking, **options)
    expected = []
    for _ in range(60):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == expected


def test_a_schedule_without_a_warm_up_of_its_own_gets_one() -> None:
    path, options = f"{TORCH}:StepLR", {"step_size": 1000}
    found = rates(path, 40, 0.25, schedule_options=options)
    assert found == pytest.approx([2e-4 * min(1, (step + 1) / 11) for step in range(40)])


@pytest.mark.parametrize(
    ("path", "options", "error", "says"),
    [
        (f"{TORCH}:ReduceLROnPlateau", {}, RequestError, "not a schedule of the step number"),
        (f"{TORCH}:StepLR", {}, RequestError, "cannot be made with.*step_size"),
        (f"{TORCH}:StepLr", {"step_size": 3}, RequestError, "has no StepLr"),
        ("nowhere.at_all:StepLR", {}, MachineError, "nowhere.at_all cannot be imported"),
        (f"{TORCH}:EPOCH_DEPRECATION_WARNING", {}, RequestError, "cannot be made"),
        (f"{TORCH}:ExponentialLR", {"gamma": -1.0}, RequestError, "gives the learning rate -"),
        (f"{TORCH}:ExponentialLR", {"gamma": 1e300}, RequestError, "gives the learning rate inf"),
    ],
)
def test_a_path_that_is_not_a_schedule_says_what_to_correct(
    path: str, options: Mapping[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        rates(path, 4, 0.0, schedule_options=options)


def test_a_word_that_is_neither_a_name_nor_a_path_is_refused() -> None:
    for word in ("cosin", "torch.optim", ":X", "a b:C"):
        with pytest.raises(RequestError, match="optimizer.schedule="):
            build_config({"optimizer.schedule": word})
