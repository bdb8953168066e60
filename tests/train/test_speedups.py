"""Compiled passes in the loop: which shapes, and what happens when compiling fails; no step waits for a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.network.compiling import CompiledBlocks, LatentShape
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import run
from lora_trainer.training.step import compute_gradients_with_oom_retry, optimizer_step
from tests.fakes.training import (
    SQUARE,
    WIDE,
    TinyTraining,
    at_start,
    build_feeder,
    build_training,
    distance,
)


def compiled(
    backend: Any, *, steps: int, shapes: frozenset[LatentShape] | None = None
) -> TinyTraining:
    """Return a training with compiled blocks; every step has three squares and one wide image."""
    feeder = build_feeder([SQUARE, SQUARE, SQUARE, WIDE])
    tiny = build_training(feeder, steps=steps, targets="attention")
    if backend is None:
        return tiny
    blocks = CompiledBlocks(tiny.training.model.denoiser, shapes=shapes, backend=backend)
    return replace(tiny, training=replace(tiny.training, compiled=blocks))


def values(tiny: TinyTraining) -> list[Tensor]:
    return [parameter.detach() for parameter in tiny.adapter.parameters()]


def eager(graph: Any, _: Any) -> Any:
    return graph


def broken(_: Any, __: Any) -> Any:
    raise OSError("no compiler")


def test_planned_shapes_run_compiled_others_do_not_and_it_is_said_once() -> None:
    plain = compiled(None, steps=2)
    run(plain.training, at_start(micro_batch=4))
    for shapes, passes in ((None, 2), (frozenset({(8, 8, 3)}), 1)):
        tiny = compiled(eager, steps=2, shapes=shapes)
        blocks = tiny.training.compiled
        assert blocks is not None
        end = run(tiny.training, at_start(micro_batch=4))
        calls = blocks.calls
        assert calls == 2 * passes * len(blocks)
        assert distance(values(tiny), values(plain)) < 1e-5
        with torch.no_grad():  # between steps nothing runs compiled
            tiny.training.model.losses(tiny.training.feeder.prepare(0)[:1])
        assert blocks.calls == calls
        assert not end.guard.uncompiled
        said = [row["what"] for row in tiny.of_kind("problem")]
        assert len(said) == 2 - passes
        assert all(
            "hardware.compile" in what and "1 latents of 10x6 at once" in what for what in said
        )


def test_a_compiler_that_fails_costs_one_line_and_no_step() -> None:
    plain, tiny = compiled(None, steps=3), compiled(broken, steps=3)
    run(plain.training, at_start(micro_batch=4))
    end = run(tiny.training, at_start(micro_batch=4))
    assert tiny.losses == plain.losses
    assert all(map(torch.equal, values(tiny), values(plain))), "the step was done again, whole"
    (problem,) = tiny.of_kind("problem")
    assert "no compiler" in problem["what"] and "hardware.compile=none" in problem["fix"]
    assert [row["key"] for row in tiny.of_kind("change")] == ["hardware.compile"]
    assert end.guard.uncompiled, "a resumed run does not try again"


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
