"""Compiled passes in the loop, of planned shapes only; no step waits for a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import run
from lora_trainer.training.step import compute_gradients_with_oom_retry, optimizer_step
from tests.fakes.trainee import compiled_calls
from tests.fakes.training import (
    SQUARE,
    WIDE,
    TinyTraining,
    at_start,
    build_feeder,
    build_training,
    distance,
)


def test_planned_shapes_run_compiled_others_do_not_and_it_is_said_once() -> None:
    """Every step has three squares, which are planned, and one wide image."""

    def training() -> TinyTraining:
        return build_training(build_feeder([SQUARE] * 3 + [WIDE]), steps=2, targets="attention")

    plain, tiny = training(), training()
    run(plain.training, at_start(micro_batch=4))
    blocks = CompiledBlocks(
        tiny.training.model.denoiser,
        shapes={(8, 8, 3)},
        backend=lambda graph, _: graph,
    )
    calls = compiled_calls(blocks)
    end = run(replace(tiny.training, compiled=blocks), at_start(micro_batch=4))
    assert len(calls) == 2 * len({*calls}) > 0, "each block once a step"
    assert distance(tiny.weights, plain.weights) < 1e-5
    with torch.no_grad():  # between steps nothing runs compiled
        tiny.training.model.losses(tiny.training.feeder.prepare(0)[:1])
    assert len(calls) == 2 * len({*calls})
    assert not end.guard.uncompiled
    (said,) = tiny.of_kind("problem")
    assert "hardware.compile" in said["what"] and "1 latents of 10x6 at once" in said["what"]


# ---- nothing waits for the device


class NoWaiting(TorchDispatchMode):
    """Fails where a GPU would make the host wait: a number of a tensor becomes one of Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asked = func.name().removeprefix("aten::").partition(".")[0]
        assert asked not in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"), asked
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", [torch.float32, torch.float16], ids=str)
def test_no_step_waits_for_a_number(precision: torch.dtype) -> None:
    dropout = {"dropout": 0.2, "rank_dropout": 0.3}
    training = build_training(
        build_feeder(), steps=3, precision=precision, adapter_settings=dropout
    ).training
    batch, guard = training.feeder.prepare(0), GuardState(micro_batch=2)
    for step in (1, 2):
        with NoWaiting():
            loss, guard = compute_gradients_with_oom_retry(training, batch, guard)
            optimizer_step(training, loss, guard, step=step)
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        float(loss)
