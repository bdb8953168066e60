"""Recorded passes: what is replayed reads and writes the same memory, and trains the same adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.training.cuda_graphs import WARM_UPS, StepGraphs
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.guards import GuardState, from_plain, to_plain
from lora_trainer.training.loop import run
from lora_trainer.training.step import (
    compute_gradients_with_oom_retry,
    optimizer_step,
)
from lora_trainer.training.training import OomFallback, Speedups
from tests.fakes.recorded import Recorded
from tests.fakes.training import (
    CPU,
    MIXED,
    SQUARE,
    WIDE,
    TinyTraining,
    add_gradients,
    at_start,
    build_feeder,
    build_training,
)

DROPOUTS = {"dropout": 0.2, "rank_dropout": 0.3}


def graphed(
    feeder: TrainingDataLoader,
    *,
    steps: int,
    most: int = 16,
    refuse: Exception | None = None,
    **options: Any,
) -> tuple[TinyTraining, Recorded]:
    """Return a training whose passes are recorded, and its recorder."""
    tiny = build_training(feeder, steps=steps, **options)
    parameters = list(tiny.training.parameters)
    recorder = Recorded(list(parameters), refuse)
    graphs = StepGraphs(capture=recorder, parameters=parameters, device=CPU, most=most)
    training = replace(tiny.training, speedups=Speedups(graphs=graphs))
    return replace(tiny, training=training), recorder


def trained(tiny: TinyTraining, *, micro_batch: int = 4) -> tuple[list[float], list[Tensor]]:
    run(tiny.training, at_start(micro_batch=micro_batch))
    return tiny.losses, [parameter.detach() for parameter in tiny.adapter.parameters()]


def same(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize(
    ("shapes", "micro_batch", "options"),
    [
        ([SQUARE] * 4, 2, {}),  # two replays of one recording add up in a step
        (MIXED, 4, {"adapter_settings": DROPOUTS}),  # masks follow from seeds that are copied in
        ([SQUARE] * 4, 4, {"precision": torch.bfloat16, "checkpointing": True}),
    ],
    ids=["accumulated", "mixed, dropout", "bf16, recomputed"],
)
def test_a_recorded_training_is_the_same_to_the_bit(
    shapes: Any, micro_batch: int, options: dict[str, Any]
) -> None:
    steps = 8
    plain = trained(
        build_training(build_feeder(shapes), steps=steps, **options), micro_batch=micro_batch
    )
    tiny, recorder = graphed(build_feeder(shapes), steps=steps, **options)
    assert same(trained(tiny, micro_batch=micro_batch), plain)
    assert sum(recording.replays for recording in recorder.recordings) > steps // 2
    assert recorder.warm_ups <= WARM_UPS * 12
    assert not tiny.of_kind("problem")


def test_gradients_stay_where_they_are() -> None:
    tiny, recorder = graphed(build_feeder([SQUARE] * 4), steps=8)
    trained(tiny)
    addresses = {tuple(found) for found in recorder.addresses}
    assert len(recorder.addresses) == 8 - WARM_UPS and len(addresses) == 1
    assert all(
        parameter.grad is not None and not parameter.grad.any()
        for parameter in tiny.training.parameters
    ), "zeroed, not dropped"


def test_each_shape_and_number_of_images_has_a_recording() -> None:
    tiny, recorder = graphed(build_feeder([SQUARE, SQUARE, SQUARE, WIDE]), steps=6)
    trained(tiny, micro_batch=2)  # every step: two squares, one square, one wide
    assert len(recorder.recordings) == 3
    assert [recording.replays for recording in recorder.recordings] == [6 - WARM_UPS] * 3


def test_more_shapes_than_there_may_be_are_computed_as_without_and_said_once() -> None:
    shapes = [SQUARE, SQUARE, SQUARE, WIDE]
    plain = trained(build_training(build_feeder(shapes), steps=6), micro_batch=2)
    tiny, recorder = graphed(build_feeder(shapes), steps=6, most=1)
    assert same(trained(tiny, micro_batch=2), plain)
    assert len(recorder.recordings) == 1
    (problem,) = tiny.of_kind("problem")
    assert "hardware.cuda_graphs" in problem["what"]


def test_what_cannot_be_recorded_is_said_and_computed_as_without() -> None:
    refusal = RuntimeError("operation not permitted when stream is capturing\nmore")
    plain = trained(build_training(build_feeder(), steps=6))
    tiny, recorder = graphed(build_feeder(), steps=6, refuse=refusal)
    assert same(trained(tiny), plain)
    assert recorder.released == 1 and tiny.training.speedups.graphs is None
    (problem,) = tiny.of_kind("problem")
    assert "operation not permitted" in problem["what"] and "\n" not in problem["what"]
    assert [row["key"] for row in tiny.of_kind("change")] == ["hardware.cuda_graphs"]


def test_out_of_memory_takes_the_recordings_before_anything_else() -> None:
    plain = trained(build_training(build_feeder([SQUARE] * 4), steps=6))
    calls = iter(range(1, 100))

    def adapt(model: Any) -> Any:
        def predict(*arguments: Any) -> Tensor:
            if next(calls) == WARM_UPS + 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found: Tensor = model.predict(*arguments)
            return found

        return replace(model, predict=predict)

    tiny, recorder = graphed(build_feeder([SQUARE] * 4), steps=6, adapt=adapt)
    end = run(tiny.training, at_start(micro_batch=4))
    assert same((tiny.losses, [p.detach() for p in tiny.adapter.parameters()]), plain)
    assert recorder.released == 1 and end.guard.micro_batch == 4 and end.guard.ungraphed
    assert from_plain(to_plain(end.guard)) == end.guard
    assert from_plain({"micro_batch": 4}) == GuardState(micro_batch=4), "states from before"


def test_nothing_is_recorded_after_a_remedy() -> None:
    """Full in a warm-up, one image at a time: inputs then wait in host memory, which no recording may hold."""

    def adapt(model: Any) -> Any:
        def predict(*arguments: Any) -> Tensor:
            if not applied:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found: Tensor = model.predict(*arguments)
            return found

        return replace(model, predict=predict)

    applied: list[str] = []
    remedy = OomFallback(
        key="memory.gradient_checkpointing",
        old="full",
        new="offloaded",
        apply=lambda: applied.append("offloaded"),
    )
    tiny, recorder = graphed(build_feeder([SQUARE] * 4), steps=6, adapt=adapt)
    training = replace(tiny.training, remedies=(remedy,))
    end = run(training, at_start(micro_batch=4))
    assert applied and end.guard.ungraphed and not recorder.recordings


def test_what_is_between_steps_may_have_the_memory_and_steps_are_recorded_anew() -> None:
    plain = trained(build_training(build_feeder([SQUARE] * 4), steps=8))

    class Hungry:
        what = "the sample"

        def due(self, progress: Any) -> bool:
            return bool(progress.step == WARM_UPS + 1)

        def __call__(self, progress: Any) -> None:
            if not recorder.released:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    tiny, recorder = graphed(build_feeder([SQUARE] * 4), steps=8, actions=[Hungry()])
    assert same(trained(tiny), plain)
    assert recorder.released == 1 and not tiny.of_kind("problem")
    assert sum(recording.replays for recording in recorder.recordings) == 8 - 2 * WARM_UPS - 1


# ---- nothing waits for the device


class NoWaiting(TorchDispatchMode):
    """Fails where a GPU would make the host wait: a number of a tensor becomes one of Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asked = func.name().removeprefix("aten::").partition(".")[0]
        assert asked not in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"), asked
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [{}, {"adapter_settings": DROPOUTS}, {"precision": torch.float16}],
    ids=["plain", "dropout", "fp16"],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_no_step_waits_for_a_number(recorded: bool, options: dict[str, Any]) -> None:
    tiny, _ = graphed(build_feeder(), steps=3, **options)
    training = tiny.training
    if not recorded:
        training = replace(training, speedups=Speedups())
    batch, guard = training.feeder.prepare(0), GuardState(micro_batch=2)
    for step in range(1, WARM_UPS + 2):
        with NoWaiting():
            loss, guard = compute_gradients_with_oom_retry(training, batch, guard)
            optimizer_step(training, loss, guard, step=step)


def test_what_waits_would_be_noticed() -> None:
    tiny = build_training(build_feeder(), steps=1)
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        float(add_gradients(tiny.training, tiny.training.feeder.prepare(0), cap=4))
