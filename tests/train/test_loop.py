"""The loop on a real, tiny model: splits change nothing, accidents are survived, resumes are exact."""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.checkpoint.states import load_newest
from lora_trainer.common.errors import MachineError, StoppedBySignal, TrainingStopped
from lora_trainer.common.processes import DistEnv
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.training import step as steps_of
from lora_trainer.training.actions import Progress
from lora_trainer.training.dataloader import Sample, TrainingDataLoader, split
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import train_steps
from lora_trainer.training.loss import Model
from tests.fakes.trainee import compiled_calls, same
from tests.fakes.training import (
    SQUARE,
    WIDE,
    EveryStep,
    TinyTraining,
    add_gradients,
    at_start,
    awaken,
    build_feeder,
    build_training,
    distance,
    gradients,
    restored,
    saves,
)


@pytest.fixture(autouse=True)
def _nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy collects garbage, which takes seconds among the objects of a whole test session."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def splittable(tiny: TinyTraining) -> tuple[Sample, ...]:
    """Return the first step with three samples of one shape: every cap from 4 to 1 splits it anew."""
    steps = map(tiny.training.feeder.prepare, range(20))
    return next(batch for batch in steps if max(map(len, split(batch, cap=4))) == 3)


# ---- splits


DROPOUTS: dict[str, Any] = {
    "dropout": 0.2,
    "rank_dropout": 0.3,
    "module_dropout": 0.2,
    "noise_rank": 1,
}


def test_no_mask_depends_on_the_split_or_on_recomputation() -> None:
    def found(cap: int, **options: Any) -> list[Tensor]:
        tiny = build_training(build_feeder(), steps=1, **options)
        awaken(tiny.adapter)
        add_gradients(tiny.training, splittable(tiny), cap=cap)
        return gradients(tiny.adapter)

    whole = found(4, adapter_settings=DROPOUTS)
    for name in DROPOUTS:
        off = None if name == "noise_rank" else 0.0
        assert distance(whole, found(4, adapter_settings=DROPOUTS | {name: off})) > 0.05
    for cap in (4, 2, 1):
        split = found(cap, adapter_settings=DROPOUTS, checkpointing=True)
        assert distance(split, whole) < 1e-5


def test_with_dropout_only_what_is_alike_is_done_at_once() -> None:
    """A network that does its batch in parts would not know whose rows it has."""
    tiny = build_training(build_feeder([SQUARE] * 4), steps=1, adapter_settings=DROPOUTS)
    batch = tiny.training.feeder.prepare(0)
    told = [float(sample.conditioning["text"].sum()) for sample in batch]
    asked: list[int] = []

    def predict(denoiser: nn.Module, noisy: Tensor, *more: Any) -> Tensor:
        asked.append(len(noisy))
        return tiny.training.model.predict(denoiser, noisy, *more)

    def alike(conditioning: Conditioning) -> int:
        return int(float(conditioning["text"].sum()) > min(told))

    for masks, expected in ((tiny.adapter.masks, [1, 3]), (None, [4])):
        asked.clear()
        model = replace(tiny.training.model, predict=predict, batch_group_key=alike, masks=masks)
        add_gradients(replace(tiny.training, model=model), batch, cap=4)
        assert sorted(asked) == expected


# ---- what a step reports and does


def test_every_step_reports_what_happened_and_its_loss_is_the_weighted_mean_of_the_batch() -> None:
    tiny = build_training(build_feeder(), steps=5)
    samples = tiny.training.feeder.prepare(0)
    with torch.no_grad():
        losses = [float(tiny.training.model.losses([sample])) for sample in samples]
    train_steps(tiny.training, at_start(micro_batch=4))
    wanted = sum(loss * sample.weight for loss, sample in zip(losses, samples, strict=True)) / 4
    assert tiny.losses[0] == pytest.approx(wanted, rel=1e-5)
    assert min(sample.weight for sample in samples) < 0.9, "else the weights are not tested"
    steps = tiny.of_kind("step")
    assert [fields["phase"] for fields in tiny.of_kind("phase")] == ["base", "train"]
    assert [fields["step"] for fields in steps] == [1, 2, 3, 4, 5]
    assert [fields["images"] for fields in steps] == [4, 8, 12, 16, 20]
    assert [fields["epoch"] for fields in steps] == pytest.approx([4 * k / 7 for k in range(1, 6)])
    rate = tiny.training.learning_rate
    assert [fields["lr"] for fields in steps] == [rate(step) for step in range(5)]
    assert all(0 < fields["grad_norm"] < math.inf for fields in steps)


def test_gradients_are_clipped_to_the_norm() -> None:
    """Measured with plain gradient descent, whose step is the gradient."""

    def moved(max_grad_norm: float) -> tuple[float, float]:
        tiny = build_training(build_feeder(), steps=1, max_grad_norm=max_grad_norm)
        awaken(tiny.adapter)
        before = tiny.weights
        descent = torch.optim.SGD([{"params": tiny.adapter.parameters(), "lr_scale": 1.0}], lr=1.0)
        training = replace(tiny.training, optimizer=descent, learning_rate=lambda step: 1.0)
        train_steps(training, at_start(micro_batch=4))
        squares = [float((a - b).square().sum()) for a, b in zip(tiny.weights, before, strict=True)]
        return sum(squares) ** 0.5, tiny.of_kind("step")[0]["grad_norm"]

    free, norm = moved(0.0)
    assert free == pytest.approx(norm, rel=1e-3)
    clipped, logged = moved(norm / 10)
    assert clipped == pytest.approx(norm / 10, rel=1e-3)
    assert logged == pytest.approx(norm), "the norm is reported as it was before clipping"


def test_a_step_in_fp16_is_that_in_fp32_but_for_rounding() -> None:
    whole, half = (
        build_training(build_feeder(), steps=2, precision=precision)
        for precision in (torch.float32, torch.float16)
    )
    scaler = half.training.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0})
    for tiny in (whole, half):
        train_steps(tiny.training, at_start(micro_batch=4))
    assert [row["grad_norm"] for row in half.of_kind("step")] == pytest.approx(
        [row["grad_norm"] for row in whole.of_kind("step")], rel=0.05
    )
    assert half.losses == pytest.approx(whole.losses, rel=0.01)
    assert all(value.dtype == torch.float32 for value in half.weights)


def test_without_a_gradient_fp16_tells_the_guards_of_a_norm_of_zero() -> None:
    tiny = build_training(build_feeder(), steps=1, precision=torch.float16)
    guard = GuardState(micro_batch=4)
    assert steps_of.optimizer_step(tiny.training, torch.tensor(0.5), guard, step=1) == 0
    assert steps_of.optimizer_step(tiny.training, torch.tensor(torch.nan), guard, step=2).isnan()


# ---- not-a-number


def poisoned(tiny: TinyTraining, *samples: str) -> None:
    """Put a NaN into the latents of these samples."""
    entries = tiny.training.feeder.entries
    for sample in samples:
        entries.read(tiny.training.feeder.sources[sample].views[0].latents)["mean"][0, 0, 0] = (
            torch.nan
        )


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_alone(name: str) -> None:
    looks: list[tuple[list[Tensor], int]] = []
    rate = OptimizerSettings.model_validate({"name": name, "learning_rate": 1e-3})
    feeder = build_feeder([SQUARE] * 4, batch_size=2)
    look = EveryStep(lambda _: looks.append((tiny.weights, counter(tiny.training.optimizer))))
    tiny = build_training(feeder, steps=6, optimizer=rate, actions=[look])
    poisoned(tiny, "s1")
    end = train_steps(tiny.training, at_start(micro_batch=2))
    bad = ["s1" in [sample.sample for sample in feeder.prepare(k)] for k in range(6)]
    assert bad.count(True) == 3, "once per epoch of two steps"
    for step, is_bad in enumerate(bad):
        (before, steps_before), (after, steps_after) = looks[step : step + 2]
        assert same(before, after) == is_bad
        assert steps_after == steps_before + (not is_bad)
    wrong = [step + 1 for step, is_bad in enumerate(bad) if is_bad]
    problems = tiny.of_kind("problem")
    assert [problem["what"].split(" was")[0] for problem in problems] == [
        f"step {step}" for step in wrong
    ]
    assert all(problem["code"] == "TRN-01" for problem in problems)
    logged = {fields["step"]: fields for fields in tiny.of_kind("step")}
    assert [step for step in logged if logged[step]["loss"] is None] == wrong
    assert [step for step in logged if logged[step]["grad_norm"] is None] == wrong
    assert end.guard.skipped_in_row == int(bad[-1])


def counter(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps it has taken: it counts them for each tensor, or for a group."""
    group, state = optimizer.param_groups[0], next(iter(optimizer.state.values()))
    return int(state["step"] if "step" in state else group.get("step", group.get("k", 0)))


@pytest.mark.parametrize("where", ["the data", "the step", "the machine's memory"])
def test_what_ends_a_run_between_saves_loses_no_whole_step_and_no_answer(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume begins with the smallest passes and every remedy: it does not climb to them again."""
    seen, taken = list[Progress](), list[str]()
    remedies = [
        steps_of.OomFallback(
            key=name, old="no", new="yes", apply=lambda name=name: taken.append(name)
        )
        for name in ("first", "second")
    ]
    tiny = build_training(
        build_feeder(), steps=9, actions=[EveryStep(seen.append)], remedies=remedies
    )
    if where == "the data":
        fail: Exception = MachineError("cache entry vanished", fix="resume")
        failing_prepare = failing(TrainingDataLoader.prepare, fail, after=3)
        monkeypatch.setattr(TrainingDataLoader, "prepare", failing_prepare)
    else:
        fail = FULL if where == "the step" else MemoryError()
        monkeypatch.setattr(Model, "losses_of", failing(Model.losses_of, fail, after=9))
    full = "one image at a time and every remedy"
    ends = (MachineError, TrainingStopped, MemoryError)
    with pytest.raises(ends, match=f"vanished|{full}|^$"):
        train_steps(tiny.training, at_start(micro_batch=4))
    last = seen[-1]
    assert (last.ending, last.stopping) == (True, True), "it is asked to save"
    assert last.step == len(tiny.of_kind("step")) > 0
    if where != "the step":
        assert (last.guard.micro_batch, last.guard.remedies, taken) == (4, 0, [])
        return
    assert (last.guard.micro_batch, last.guard.remedies) == (1, 2)
    assert taken == ["first", "second"]
    before = len(tiny.of_kind("out_of_memory"))
    with pytest.raises(TrainingStopped):
        train_steps(tiny.training, replace(last, ending=False, stopping=False))
    assert len(tiny.of_kind("out_of_memory")) == before + 1 and len(taken) == 2
    assert seen[-1] is last, "a resume repeats no start"


def test_a_remedy_that_needs_more_memory_than_there_is_ends_the_run_and_is_there_at_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed blocks need buffers on the device: seen on a pretended card that was smaller than it said."""
    seen = list[Progress]()

    def apply() -> None:
        raise FULL

    remedy = steps_of.OomFallback(key="memory.streamed_blocks", old=0, new=8, apply=apply)
    tiny = build_training(
        build_feeder(), steps=9, actions=[EveryStep(seen.append)], remedies=[remedy]
    )
    monkeypatch.setattr(Model, "losses_of", failing(Model.losses_of, FULL, after=9))
    with pytest.raises(TrainingStopped, match=r"while memory.streamed_blocks was changed to 8"):
        train_steps(tiny.training, at_start(micro_batch=1))
    assert seen[-1].guard.remedies == 1 and seen[-1].ending, "it is asked to save"


FAULT = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED\nmore")
LOST = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")
WRONG = ValueError("this base is not as it should be")
FULLY = steps_of.OomFallback(
    key="memory.gradient_checkpointing", old="light", new="full", apply=lambda: None
)


@pytest.mark.parametrize(
    ("errors", "has_another_way", "said", "calls"),
    [
        pytest.param({1: FAULT, 2: WRONG}, True, "optional feature off: ValueError: t", 2, id="2"),
        pytest.param({1: WRONG}, False, "^this base is not", 1, id="a plain run"),
        pytest.param({1: LOST}, True, "cannot be used by this process.*assert", 1, id="lost"),
        pytest.param({2: FAULT}, True, "", 4, id="cured"),
    ],
)
def test_an_error_is_tried_once_another_way(
    errors: dict[int, Exception], has_another_way: bool, said: str, calls: int
) -> None:
    """Nothing is tried twice where there is no other way, and what is tried is kept."""
    done = list[int]()

    def adapt(model: Model) -> Model:
        def predict(*arguments: Any) -> Tensor:
            done.append(1)
            if error := errors.get(len(done)):
                raise error
            return model.predict(*arguments)

        return replace(model, predict=predict)

    tiny = build_training(build_feeder([SQUARE]), steps=3, adapt=adapt)
    training = replace(tiny.training, plain=[FULLY] if has_another_way else [])
    if said:
        with pytest.raises((TrainingStopped, ValueError), match=said) as caught:
            train_steps(training, at_start(micro_batch=4))
        if errors[1] is LOST:
            assert "--set memory.gradient_checkpointing=full" in caught.value.fix  # type: ignore[union-attr]
    else:
        assert train_steps(training, at_start(micro_batch=4)).guard.plain
        unfailed = build_training(build_feeder([SQUARE]), steps=3)
        train_steps(unfailed.training, at_start(micro_batch=4))
        assert same(tiny.weights, unfailed.weights)
    assert len(done) == calls
    retried = [row for row in tiny.of_kind("problem") if "not about memory" in row["what"]]
    assert len(retried) == (errors.get(1) is FAULT or not said)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_action_is_tried_once_another_way_by_a_single_process(processes: int) -> None:
    """Other processes may be past the action, and would wait for a second one for ever."""
    seen = list[int]()

    def act(progress: Progress) -> None:
        seen.append(progress.step)
        if len(seen) == 3:
            raise WRONG

    tiny = build_training(build_feeder([SQUARE]), steps=3, actions=[EveryStep(act)], plain=[FULLY])
    if processes == 1:
        assert train_steps(tiny.training, at_start(micro_batch=4)).guard.plain
        assert seen == [0, 1, 2, 2, 3]
        return
    ranks = ProcessGroup(dist_env=DistEnv(count=2))
    with (
        patch.object(ProcessGroup, "reduce", lambda self, parameters, loss, ask: loss),
        pytest.raises(ValueError, match="^this base"),
    ):
        train_steps(replace(tiny.training, ranks=ranks), at_start(micro_batch=4))
    assert seen == [0, 1, 2]


def test_an_error_of_a_save_is_the_end(tmp_path: Path) -> None:
    """It is raised by the next save; that one done again another way would hide it."""
    tiny = build_training(build_feeder([SQUARE]), steps=6, plain=[FULLY])
    action = saves(tiny, tmp_path, every_steps=2)
    with (
        patch("lora_trainer.checkpoint.writer.write_state", side_effect=[KeyError("x"), tmp_path]),
        pytest.raises(KeyError, match="x"),
    ):
        train_steps(replace(tiny.training, actions=[action]), at_start(micro_batch=4))
    assert len(tiny.losses) == 4 and not tiny.of_kind("problem")


def test_another_way_that_cannot_be_taken_is_the_end_and_is_remembered(tmp_path: Path) -> None:
    def refused() -> None:
        raise RuntimeError("no room")

    tiny = build_training(build_feeder([SQUARE]), steps=4, plain=[replace(FULLY, apply=refused)])
    predict = failing(tiny.training.model.predict, FAULT, after=2)
    model, action = replace(tiny.training.model, predict=predict), saves(tiny, tmp_path)
    with pytest.raises(TrainingStopped, match="EXECUTION_FAILED.*checkpointing could.*no room"):
        train_steps(replace(tiny.training, model=model, actions=[action]), at_start(micro_batch=4))
    state = load_newest(tmp_path, events=None)
    assert state is not None and (state.step, state.guard["plain"]) == (2, True)


@pytest.mark.parametrize(("in_force", "on_the_plain_way"), [(1, 0), (2, 1)])
def test_the_plain_way_has_remedies_of_its_own(in_force: int, on_the_plain_way: int) -> None:
    def broken(*_: Any) -> Tensor:
        raise ValueError("it failed")

    change = steps_of.OomFallback(key="memory.streamed_blocks", old=3, new=0, apply=lambda: None)
    tiny = build_training(build_feeder(), steps=1, adapt=lambda m: replace(m, predict=broken))
    blocks = CompiledBlocks(tiny.training.model.denoiser, shapes=(), backend="eager")
    ways: Any = {"remedies": [change] * 2, "plain": [change], "plain_remedies": [change]}
    guard = GuardState(micro_batch=1, remedies=in_force)
    with pytest.raises(TrainingStopped, match="it failed") as end:
        train_steps(
            replace(tiny.training, **ways, compiled=blocks),
            replace(at_start(micro_batch=1), guard=guard),
        )
    left: Any = end.value
    assert left.guard == replace(guard, plain=True, uncompiled=True, remedies=on_the_plain_way)
    assert blocks.is_off


def failing(real: Callable[..., Any], error: Exception, *, after: int) -> Callable[..., Any]:
    """Return a function that does as `real` so many times and then raises."""
    calls = iter(range(1_000_000))

    def function(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise error
        return real(*arguments)

    return function


# ---- a device that is full in a step: the adapter is what it would have been


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
UNEVEN = (SQUARE, WIDE, WIDE, WIDE)
"""One micro-batch of one and one of three: the second fails after the first left its gradients."""
DROPPING: dict[str, Any] = {"adapter_settings": DROPOUTS, "averaged": True}


def averaging(tiny: TinyTraining) -> steps_of.Training:
    return replace(tiny.training, afterwards=[partial(tiny.adapter.update_average, decay=0.9)])


def test_nothing_changes_but_the_micro_batch() -> None:
    """The step is done again with the dropout masks it had, and taken into the average once.

    That memory is short is not the compiler's fault.
    """
    feeder = build_feeder(UNEVEN)
    assert [len(group) for group in split(feeder.prepare(1), cap=4)] in ([1, 3], [3, 1])

    def holding_two(model: Model) -> Model:
        def predict(denoiser: nn.Module, noisy: Tensor, *rest: Any) -> Tensor:
            if len(noisy) > 2:
                raise FULL
            return model.predict(denoiser, noisy, *rest)

        return replace(model, predict=predict)

    tiny = build_training(feeder, steps=4, adapt=holding_two, **DROPPING)
    blocks = CompiledBlocks(tiny.training.model.denoiser, shapes=(), backend="eager")
    end = train_steps(replace(averaging(tiny), compiled=blocks), at_start(micro_batch=4))
    assert tiny.of_kind("change") == [
        {"key": "memory.micro_batch", "old": 4, "new": 2, "reason": str(FULL)}
    ]
    assert (end.step, end.images, end.guard.micro_batch) == (4, 16, 2)
    assert end.guard.patience_steps == 100
    assert end.guard.fitting_steps == 4, "the step that was done again counts as the others"
    other = build_training(build_feeder(UNEVEN), steps=4, **DROPPING)
    train_steps(averaging(other), at_start(micro_batch=2))
    assert same(*([*each.adapter.state().values()] for each in (tiny, other)))
    assert tiny.losses == other.losses


def test_it_grows_back_once_enough_steps_have_fitted() -> None:
    tiny = build_training(build_feeder([SQUARE]), steps=12)
    progress = Progress(step=0, images=0, guard=GuardState(micro_batch=1, patience_steps=5))
    end = train_steps(tiny.training, progress)
    assert [(row["old"], row["new"]) for row in tiny.of_kind("change")] == [(1, 2), (2, 4)]
    assert end.guard.micro_batch == 4
    assert len(tiny.losses) == 12


def test_a_torn_optimizer_step_without_a_good_state_is_the_end() -> None:
    tiny = build_training(build_feeder(), steps=3)
    with (
        patch.object(tiny.training.optimizer, "step", side_effect=FULL),
        pytest.raises(TrainingStopped, match="in the optimizer") as caught,
    ):
        train_steps(tiny.training, at_start(micro_batch=4))
    assert "--resume" in caught.value.fix


# ---- stopping and resuming


def test_a_signal_after_the_last_step_changes_nothing() -> None:
    tiny = build_training(build_feeder(), steps=2)
    stop = lambda: signal.SIGINT if len(tiny.losses) == 2 else None  # noqa: E731 - shorter than a function
    assert train_steps(replace(tiny.training, stop=stop), at_start(micro_batch=4)).step == 2


def test_the_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    feeder = build_feeder([SQUARE], batch_size=2)
    first = build_training(feeder, steps=5, precision=torch.float16)
    scaler = first.training.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 3})
    training = replace(first.training, actions=[saves(first, tmp_path)])
    train_steps(training, at_start(micro_batch=2))
    second = build_training(feeder, steps=9, precision=torch.float16)
    resumed, optimizer = second.training.scaler, second.training.optimizer
    for parameter in second.training.parameters:
        parameter.grad = torch.ones_like(parameter)
    resumed.scale(torch.ones(()))
    resumed.unscale_(optimizer)  # a step that is torn here is not an obstacle
    state = load_newest(tmp_path, events=None)
    assert state is not None and restored(second, state).step == 5
    assert resumed.state_dict() == scaler.state_dict()
    assert (resumed.get_scale(), resumed.state_dict()["_growth_tracker"]) == (512.0, 8)
    resumed.unscale_(optimizer)


def test_what_stopped_is_moved_by_neither_momentum_nor_weight_decay() -> None:
    looks: list[list[Tensor]] = []
    rate = OptimizerSettings(learning_rate=1e-2, weight_decay=0.5)
    tiny = build_training(build_feeder(), steps=5, optimizer=rate)
    weights = tiny.adapter.parameters()
    look = EveryStep(lambda _: looks.append([weight.detach().clone() for weight in weights]))
    stages = [(weight, 3) for weight in weights[:2]]
    training = replace(tiny.training, stages=stages, actions=[look])
    train_steps(training, at_start(micro_batch=4))
    for step, (before, after) in enumerate(pairwise(looks)):
        moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert moved == [step < 3] * 2 + [True] * len(moved[2:])
    # Step 0 comes again after a rollback, and is trained as before.
    once = training.settings.model_copy(update={"steps": 1})
    train_steps(replace(training, settings=once), at_start(micro_batch=4))
    assert all(weight.requires_grad for weight in weights)


@pytest.mark.parametrize("works", [True, False])
def test_planned_shapes_run_compiled_until_that_fails(works: bool) -> None:
    """Every step has three squares, which are planned, and one wide image: it has left its gradients when they fail."""

    def backend(graph: Any, _: Any) -> Any:
        if works:
            return graph
        raise ValueError("no compiler")

    plain, tiny = (
        build_training(build_feeder([SQUARE] * 3 + [WIDE]), steps=2, targets="attention")
        for _ in range(2)
    )
    train_steps(plain.training, at_start(micro_batch=4))
    blocks = CompiledBlocks(tiny.training.model.denoiser, shapes={(8, 8, 3)}, backend=backend)
    calls = compiled_calls(blocks)
    end = train_steps(replace(tiny.training, compiled=blocks), at_start(micro_batch=4))
    assert end.guard.uncompiled == blocks.is_off == (not works)
    if not works:
        assert same(tiny.weights, plain.weights)
        return
    assert len(calls) == 2 * len({*calls}) > 0, "each block once a step"
    assert distance(tiny.weights, plain.weights) < 1e-5
    with torch.no_grad():  # between steps nothing runs compiled
        tiny.training.model.losses(tiny.training.feeder.prepare(0)[:1])
    assert len(calls) == 2 * len({*calls})
    (said,) = tiny.of_kind("problem")
    assert "hardware.compile" in said["what"] and "1 latents of 10x6 at once" in said["what"]


def test_a_stop_while_blocks_are_compiled_is_not_the_compilers_fault() -> None:
    tiny = build_training(build_feeder([SQUARE] * 4), steps=2, targets="attention")
    blocks = CompiledBlocks(
        tiny.training.model.denoiser, shapes={(8, 8, 4)}, backend=lambda graph, _: graph
    )
    before = [weight.clone() for weight in tiny.weights]
    training = replace(tiny.training, compiled=blocks, stop=lambda: int(signal.SIGTERM))
    with pytest.raises(StoppedBySignal) as stopped:
        train_steps(training, at_start(micro_batch=4))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not blocks.is_off and same(tiny.weights, before)
    assert not tiny.of_kind("problem") and not tiny.of_kind("step")


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
    masks = {"dropout": 0.2, "rank_dropout": 0.3, "noise_rank": 1}
    feeder = build_feeder(objective=ObjectiveSettings(contrast_scale=3.0))
    training = build_training(feeder, steps=3, precision=precision, adapter_settings=masks).training
    batch, guard = training.feeder.prepare(0), GuardState(micro_batch=2)
    for step in (1, 2):
        with NoWaiting():
            loss, guard = steps_of.compute_gradients_with_oom_retry(training, batch, guard)
            steps_of.optimizer_step(training, loss, guard, step=step)
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        float(loss)
