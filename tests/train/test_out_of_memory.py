"""A device that is full in a step: remedies are taken, and the adapter is what it would have been."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.errors import TrainingStopped
from lora_trainer.training.actions import Progress
from lora_trainer.training.dataloader import split
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import run
from lora_trainer.training.loss import Model
from lora_trainer.training.step import Training
from tests.fakes.trainee import same
from tests.fakes.training import (
    SQUARE,
    WIDE,
    TinyTraining,
    at_start,
    build_feeder,
    build_training,
)

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB"
UNEVEN = (SQUARE, WIDE, WIDE, WIDE)
"""One micro-batch of one and one of three: the second fails after the first left its gradients."""


@pytest.fixture(autouse=True)
def _nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy collects garbage, which takes seconds among the objects of a whole test session."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"{MESSAGE}\nmore")


def changes(tiny: TinyTraining) -> list[tuple[Any, Any, Any]]:
    return [(row["key"], row["old"], row["new"]) for row in tiny.of_kind("change")]


def holding(images: int) -> Callable[[Model], Model]:
    """Return how a model changes on a device that holds this many images."""

    def adapt(model: Model) -> Model:
        def predict(denoiser: nn.Module, noisy: Tensor, *rest: Any) -> Tensor:
            if len(noisy) > images:
                raise full()
            return model.predict(denoiser, noisy, *rest)

        return replace(model, predict=predict)

    return adapt


# ---- the micro-batch


DROPPING: dict[str, Any] = {
    "adapter_settings": {"dropout": 0.2, "rank_dropout": 0.2, "module_dropout": 0.2},
    "averaged": True,
}


def averaging(tiny: TinyTraining) -> Training:
    return replace(tiny.training, afterwards=[partial(tiny.adapter.update_average, decay=0.9)])


def test_nothing_changes_but_the_micro_batch() -> None:
    """The step is done again with the dropout masks it had, and taken into the average once."""
    feeder = build_feeder(UNEVEN)
    assert [len(group) for group in split(feeder.prepare(1), cap=4)] in ([1, 3], [3, 1])
    tiny = build_training(feeder, steps=4, adapt=holding(2), **DROPPING)
    end = run(averaging(tiny), at_start(micro_batch=4))
    assert tiny.of_kind("change") == [
        {"key": "memory.micro_batch", "old": 4, "new": 2, "reason": MESSAGE}
    ]
    assert (end.step, end.images, end.guard.micro_batch) == (4, 16, 2)
    assert end.guard.patience_steps == 100
    assert end.guard.fitting_steps == 4, "the step that was done again counts as the others"
    other = build_training(build_feeder(UNEVEN), steps=4, **DROPPING)
    run(averaging(other), at_start(micro_batch=2))
    assert same(*([*each.adapter.state().values()] for each in (tiny, other)))
    assert tiny.losses == other.losses


def test_it_grows_back_once_enough_steps_have_fitted() -> None:
    tiny = build_training(build_feeder([SQUARE]), steps=12)
    progress = Progress(step=0, images=0, guard=GuardState(micro_batch=1, patience_steps=5))
    end = run(tiny.training, progress)
    assert changes(tiny) == [("memory.micro_batch", 1, 2), ("memory.micro_batch", 2, 4)]
    assert end.guard.micro_batch == 4
    assert len(tiny.losses) == 12


# ---- in the optimizer


def test_a_torn_optimizer_step_without_a_good_state_is_the_end() -> None:
    tiny = build_training(build_feeder(), steps=3)
    with (
        patch.object(tiny.training.optimizer, "step", side_effect=full()),
        pytest.raises(TrainingStopped, match="in the optimizer") as caught,
    ):
        run(tiny.training, at_start(micro_batch=4))
    assert "--resume" in caught.value.fix
