"""The last save of a run: tried whatever became of those before, and never called saved when it is not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.checkpoint import writer
from lora_trainer.checkpoint.states import load_newest, write_state
from lora_trainer.common.errors import MachineError, StoppedBySignal, TrainingStopped
from lora_trainer.training.actions import SaveAction
from lora_trainer.training.loop import run
from lora_trainer.training.training import Progress
from tests.fakes.training import SQUARE, TinyTraining, at_start, build_feeder, build_training, saves

FULL = MachineError("cannot write: No space left on device (0 bytes free)", fix="free some space")
STEPS = 5


def training() -> TinyTraining:
    return build_training(build_feeder([SQUARE] * 2, batch_size=1), steps=STEPS)


def trained(
    tiny: TinyTraining,
    folder: Path,
    *,
    stop: Callable[[], int | None] = lambda: None,
    adapt: Callable[[SaveAction], SaveAction] = lambda action: action,
) -> Progress:
    """Train and save after every step."""
    action = saves(tiny, folder, every_steps=1)
    with action.writer:
        return run(
            replace(tiny.training, actions=[adapt(action)], stop=stop), at_start(micro_batch=1)
        )


def disk(monkeypatch: pytest.MonkeyPatch, *, refuses: set[int]) -> list[int]:
    """Let the disk refuse the states of these steps; return a list that grows by every step tried."""
    tried: list[int] = []

    def write(folder: Path, frozen: Any, *, keep: int) -> Path:
        tried.append(frozen.state.step)
        if frozen.state.step in refuses:
            raise FULL
        return write_state(folder, frozen, keep=keep)

    monkeypatch.setattr(writer, "write_state", write)
    return tried


def test_at_the_end_it_is_tried_and_refused_it_is_no_reason_to_lose_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, tried = training(), disk(monkeypatch, refuses={2, 3, 4, 5})
    assert trained(tiny, tmp_path).step == STEPS
    assert tried == [1, 2, 3, 4, 5]
    problems = [row["what"] for row in tiny.of_kind("problem")]
    assert len(problems) == 4 and "the last save" in problems[-1]
    found = load_newest(tmp_path, events=None)
    assert found is not None and found.step == 1


def test_at_a_stop_it_is_tried_after_three_that_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, tried = training(), disk(monkeypatch, refuses={1, 2, 3})
    steps = iter([None, None, None, 15])
    with pytest.raises(StoppedBySignal, match="the state is saved"):
        trained(tiny, tmp_path, stop=lambda: next(steps))
    assert tried == [1, 2, 3, 4]
    found = load_newest(tmp_path, events=None)
    assert found is not None and found.step == 4


def test_a_stop_whose_save_is_refused_is_not_called_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = training()
    disk(monkeypatch, refuses={2})
    steps = iter([None, 15])
    with pytest.raises(MachineError, match="No space left"):
        trained(tiny, tmp_path, stop=lambda: next(steps))


def full(times: int) -> Callable[[SaveAction], SaveAction]:
    """Return how saving changes where copying the state finds the device full so many times."""
    calls: list[int] = []

    class Full(SaveAction):
        def state(self, progress: Progress) -> Any:
            calls.append(progress.step)
            if len(calls) <= times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().state(progress)

    return lambda action: Full(**vars(action))


def test_a_stop_on_a_full_device_is_tried_again_and_then_no_stop_but_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # seconds in a long test session
    with pytest.raises(StoppedBySignal, match="the state is saved"):
        trained(training(), tmp_path / "once", stop=lambda: 15, adapt=full(1))
    found = load_newest(tmp_path / "once", events=None)
    assert found is not None and found.step == 1
    with pytest.raises(TrainingStopped, match="the saved state of step 1 is missing"):
        trained(training(), tmp_path / "always", stop=lambda: 15, adapt=full(99))
    assert load_newest(tmp_path / "always", events=None) is None
