"""Instability: back to the last good state at a lower rate, then the end; what guards change is resumed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_trainer.checkpoint import writer
from lora_trainer.checkpoint.states import TrainingState, load_newest, write_state
from lora_trainer.checkpoint.writer import StateWriter
from lora_trainer.common.errors import InputError, MachineError, StoppedBySignal, TrainingStopped
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.run.run_job import doubt_of, make_folder_again, refuse_worthless
from lora_trainer.training.actions import Progress, SaveAction
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import train_steps
from lora_trainer.training.loss import Model
from tests.fakes.trainee import same
from tests.fakes.training import (
    SQUARE,
    EveryStep,
    TinyTraining,
    at_start,
    build_feeder,
    build_training,
    restored,
    saves,
)


@dataclass
class Voyage:
    """A training that can go back to its last save, as a run builds it."""

    tiny: TinyTraining
    saves: SaveAction

    @property
    def writer(self) -> StateWriter:
        return self.saves.writer

    @property
    def rates(self) -> list[tuple[int, float]]:
        """Return (step, learning rate over that of the schedule) of every step that was tried."""
        rate = self.tiny.training.learning_rate
        steps = self.tiny.of_kind("step")
        return [(row["step"], row["lr"] / rate(row["step"] - 1)) for row in steps]

    def run(self, start: Progress | None = None, **changes: Any) -> Progress:
        start = start or at_start(micro_batch=2)
        self.writer.remember(self.saves.state(start))
        actions = [*changes.pop("actions", ()), self.saves]
        training = replace(self.tiny.training, actions=actions, restore=self.restore, **changes)
        with self.writer:
            return train_steps(training, start)

    def restore(self) -> Progress:
        self.writer.wait()
        return restored(self.tiny, self.writer.last_good())

    def on_disk(self) -> TrainingState:
        state = load_newest(self.writer.folder, events=None)
        assert state is not None
        return state


def voyage(folder: Path, storms: Sequence[int] = (), *, every_steps: int = 4) -> Voyage:
    """Return a training of twelve steps, saved now and then, whose predictions are spoilt at these calls, from 1."""
    calls = count(1)

    def adapt(model: Model) -> Model:
        def predict(*args: Any) -> Tensor:
            predicted = model.predict(*args)
            return predicted * torch.nan if next(calls) in storms else predicted

        return replace(model, predict=predict)

    tiny = build_training(build_feeder([SQUARE] * 5, batch_size=2), steps=12, adapt=adapt)
    return Voyage(tiny=tiny, saves=saves(tiny, folder, every_steps=every_steps))


def test_after_five_it_goes_on_from_the_last_save_at_half_the_rate(tmp_path: Path) -> None:
    found = voyage(tmp_path, range(6, 11))  # steps 6-10; saved at 4 and, skipping, at 8
    end = found.run()
    assert end.step == 12
    assert (end.guard.rollbacks, end.guard.lr_scale) == (1, 0.5)
    assert found.rates == [(step, pytest.approx(1.0)) for step in range(1, 11)] + [
        (step, pytest.approx(0.5)) for step in range(5, 13)
    ]
    (change,) = found.tiny.of_kind("change")
    assert (change["old"], change["new"]) == (1.0, 0.5)
    # Not to step 8: what was saved amid skipped steps may be their cause.
    assert change["reason"].startswith("back to step 4: the gradients were not finite numbers 5")
    assert all(weight.isfinite().all() for weight in found.tiny.weights)
    assert found.on_disk().guard["lr_scale"] == 0.5


@pytest.mark.parametrize(
    ("storm", "every_steps", "killed_at", "left"),
    [
        # The last good state is on the disk; its own save would have pruned it; it is that of the start.
        (range(6, 11), 4, 9, (8, 3)),
        (range(6, 11), 1, 9, (8, 3)),
        (range(2, 7), 4, 5, (4, 3)),
    ],
)
def test_it_is_the_same_whether_a_kill_came_amid_skipped_steps(
    storm: range, every_steps: int, killed_at: int, left: tuple[int, int], tmp_path: Path
) -> None:
    """The killed run is resumed from its state on the disk and meets the same weather."""
    whole = voyage(tmp_path / "whole", storm, every_steps=every_steps)
    whole.run()
    first = voyage(tmp_path / "killed", storm, every_steps=every_steps)

    def kill(progress: Progress) -> None:
        if progress.step == killed_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(actions=[EveryStep(kill)])
    first.writer.wait()
    calls_before = left[0]
    weather = [call - calls_before for call in storm if call > calls_before]
    again = voyage(tmp_path / "killed", weather, every_steps=every_steps)
    start = restored(again.tiny, again.on_disk())
    assert (start.step, start.guard.skipped_in_row) == left
    again.run(start)
    (change,) = again.tiny.of_kind("change")
    (uninterrupted,) = whole.tiny.of_kind("change")
    assert change["reason"] == uninterrupted["reason"]
    assert same(again.tiny.weights, whole.tiny.weights)
    assert again.on_disk().guard == whole.on_disk().guard


def test_states_before_a_storm_stay_on_the_disk_until_a_good_one_is_there(tmp_path: Path) -> None:
    found, kept = voyage(tmp_path, range(4, 7), every_steps=1), dict[int, list[str]]()

    def look(progress: Progress) -> None:
        found.writer.wait()
        kept[progress.step] = sorted(path.name[-1] for path in tmp_path.glob("step-*"))

    found.run(actions=[EveryStep(look)])  # each look is before the save of its step
    assert kept[4] == ["2", "3"]
    assert (kept[6], kept[7]) == (["3", "4", "5"], ["3", "5", "6"])
    assert kept[8] == ["6", "7"]


def test_a_weight_that_is_spoilt_is_never_saved_and_undone(tmp_path: Path) -> None:
    found, at = voyage(tmp_path), [8]

    def spoil(progress: Progress) -> None:
        if progress.step in at:
            at.clear()
            with torch.no_grad():
                found.tiny.adapter.parameters()[0].view(-1)[0] = torch.nan

    end = found.run(actions=[EveryStep(spoil)])
    assert (end.step, end.guard.rollbacks) == (12, 1)
    (change,) = found.tiny.of_kind("change")
    assert change["reason"].startswith("back to step 4: step 8 is not saved")
    assert all(weight.isfinite().all() for weight in found.tiny.weights)
    assert all(tensor.isfinite().all() for tensor in found.on_disk().adapter.values())


def test_a_rate_far_too_high_is_never_blamed_on_the_base(tmp_path: Path) -> None:
    """Its first step is finite, and after it only the rate can be the fault: three rollbacks, then exit 5."""
    tiny = voyage(tmp_path).tiny
    found = Voyage(tiny=tiny, saves=saves(tiny, tmp_path, every_steps=50))
    with pytest.raises(TrainingStopped, match="3 times at ever lower") as caught:
        found.run(learning_rate=lambda _: 1e30)
    assert "learning_rate" in caught.value.fix and "base" not in str(caught.value)


@pytest.mark.parametrize("start", [None, "old.safetensors"])
def test_steps_that_are_all_skipped_are_the_fault_of_what_the_run_began_with(
    start: str | None, tmp_path: Path
) -> None:
    found = voyage(tmp_path, range(1, 100))
    settings = found.tiny.training.settings.model_copy(update={"init_from": start})
    with pytest.raises(InputError, match=start or "weights of the base are damaged") as caught:
        found.run(settings=settings)
    assert start is None or "the weights of the base are damaged" not in caught.value.found


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradients_are(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in fp16, whose scaler looks at gradients alone; and no search for a scale is blamed."""
    feeder, real = build_feeder([SQUARE] * 2, batch_size=2), Model.losses_of
    # No gradient sees an infinite constant.
    monkeypatch.setattr(Model, "losses_of", lambda *arguments: real(*arguments) + torch.inf)
    tiny = build_training(feeder, steps=2, precision=precision)
    if precision == torch.float16:  # a scale at which no gradient overflows
        scaler = tiny.training.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    before = [parameter.detach().clone() for parameter in tiny.adapter.parameters()]
    end = train_steps(tiny.training, at_start(micro_batch=2))
    assert end.guard.skipped_in_row == 2
    assert same([parameter.detach() for parameter in tiny.adapter.parameters()], before)
    assert len(tiny.of_kind("problem")) == 2 and not tiny.of_kind("change")


# ---- the last save of a run: tried whatever became of those before, and never called saved when it is not


FULL = MachineError("cannot write: No space left on device (0 bytes free)", fix="free some space")


def trained(
    folder: Path,
    *,
    stop: Callable[[], int | None] = lambda: None,
    adapt: Callable[[SaveAction], SaveAction] = lambda action: action,
) -> list[str]:
    """Train five steps, save after every one; return the problems."""
    tiny = build_training(build_feeder([SQUARE] * 2, batch_size=1), steps=5)
    action = saves(tiny, folder, every_steps=1)
    with action.writer:
        train_steps(
            replace(tiny.training, actions=[adapt(action)], stop=stop), at_start(micro_batch=1)
        )
    return [row["what"] for row in tiny.of_kind("problem")]


def disk(monkeypatch: pytest.MonkeyPatch, *, refuses: set[int]) -> list[int]:
    """Let the disk refuse the states of these steps; return a list that grows by every step tried."""
    tried: list[int] = []

    def write(folder: Path, frozen: Any, *, keep: int) -> Path:
        tried.append(frozen.step)
        if frozen.step in refuses:
            raise FULL
        return write_state(folder, frozen, keep=keep)

    monkeypatch.setattr(writer, "write_state", write)
    return tried


def test_at_the_end_it_is_tried_and_refused_it_is_no_reason_to_lose_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = disk(monkeypatch, refuses={2, 3, 4, 5})
    problems = trained(tmp_path)
    assert tried == [1, 2, 3, 4, 5]
    assert len(problems) == 4 and "the last save" in problems[-1]
    found = load_newest(tmp_path, events=None)
    assert found is not None and found.step == 1


def test_a_stop_whose_save_is_refused_is_not_called_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, refuses={2})
    steps = iter([None, 15])
    with pytest.raises(MachineError, match="No space left"):
        trained(tmp_path, stop=lambda: next(steps))


def full(times: int) -> Callable[[SaveAction], SaveAction]:
    """Return how saving changes where copying the state finds the device full so many times."""
    calls = iter(range(1000))

    class Full(SaveAction):
        def state(self, progress: Progress) -> Any:
            if next(calls) < times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().state(progress)

    return lambda action: Full(**vars(action))


def test_a_stop_on_a_full_device_is_tried_again_and_then_no_stop_but_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # seconds in a long test session
    with pytest.raises(StoppedBySignal, match="the state is saved"):
        trained(tmp_path / "once", stop=lambda: 15, adapt=full(1))
    found = load_newest(tmp_path / "once", events=None)
    assert found is not None and found.step == 1
    with pytest.raises(TrainingStopped, match="the saved state of step 1 is missing"):
        trained(tmp_path / "always", stop=lambda: 15, adapt=full(99))
    assert load_newest(tmp_path / "always", events=None) is None


def test_a_folder_that_was_removed_is_made_again_for_the_lora(tmp_path: Path) -> None:
    events, said, folder = EventStream(), list[Event](), tmp_path / "runs" / "toy"
    events.subscribe(said.append)
    job: Any = SimpleNamespace(folder=folder, events=events)
    make_folder_again(job)
    assert folder.is_dir() and "was removed while the run trained" in said[0].fields["what"]
    (folder / "run.json").touch()
    make_folder_again(job)
    assert len(said) == 1, "nothing is said of a folder that is there"


@pytest.mark.parametrize(
    ("losses", "rollbacks", "said"),
    [
        ([0.1, 0.2, 0.0999], 0, []),
        ([0.1, 0.1001], 0, []),  # less than what is called clear
        ([0.1], 0, []),  # the base only
        ([math.nan], 0, []),  # nothing was validated
        ([0.1, 0.05, 0.11], 0, ["worse than the base", "validation loss 0.1100, 10 % above"]),
        ([0.1, math.nan], 0, ["validation loss of the LoRA is not a number"]),
        ([0.1, 0.05], 2, ["went back 2 times", "0.25 of the learning rate"]),
        ([0.1, 0.3], 1, ["worse than the base", "went back once"]),
    ],
)
def test_what_speaks_against_a_finished_lora_is_said(
    losses: list[float], rollbacks: int, said: list[str]
) -> None:
    guard = GuardState(micro_batch=1, rollbacks=rollbacks, lr_scale=0.5**rollbacks)
    doubt = doubt_of(guard, losses)
    assert bool(doubt) == bool(said) and all(words in doubt for words in said)


def test_a_run_that_learned_nothing_does_not_end_well() -> None:
    """All of its steps were skipped, or what a new adapter begins with is all it has."""
    end = Progress(step=3, images=6, guard=GuardState(micro_batch=2))
    zero, moved = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TrainingStopped, match="nothing was learned: after 3 steps"):
        refuse_worthless([zero], end, start=None)
    refuse_worthless([zero, moved], end, start=None)
    refuse_worthless([], end, start="started.safetensors")
    skipped = replace(end, guard=replace(end.guard, skipped_in_row=3))
    with pytest.raises(InputError, match="from the first step on"):
        refuse_worthless([zero], skipped, start=None)
