"""Saves in the background: what is written, when it counts, who waits, what a refusing disk does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.checkpoint import writer as checkpoint_writer
from lora_trainer.checkpoint.codec import Copy
from lora_trainer.checkpoint.states import (
    Frozen,
    LoopValues,
    TrainingState,
    load_newest,
    write_state,
)
from lora_trainer.checkpoint.writer import MAX_FAILURES, StateWriter
from lora_trainer.common.errors import LoraTrainError, MachineError, TrainingStopped
from lora_trainer.common.events import Event, EventStream

PATIENCE_S = 30.0
FULL = MachineError("cannot write: No space left on device (0 bytes free)", fix="free some space")


def state_at(step: int, *, weight: torch.Tensor | None = None) -> TrainingState:
    values = torch.full((3, 2), float(step)) if weight is None else weight
    moments = {"state": {0: {"exp_avg": values * 2, "step": torch.tensor(float(step))}}}
    return TrainingState(
        step=step,
        images_seen=4 * step,
        adapter={"a.down": values},
        optimizer={**moments, "param_groups": [{"lr": 0.1, "params": [0]}]},
        loop=LoopValues(guard={"kept": "f"}),
    )


@dataclass
class Disk:
    """Stands in for the disk: each write waits for `open`, fails with `error`, is counted."""

    real: Callable[..., Path] = write_state
    open: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    steps: list[int] = field(default_factory=list)
    busy: int = 0
    most: int = 0

    def write(self, folder: Path, state: Frozen, *, keep: int) -> Path:
        self.busy += 1
        self.most = max(self.most, self.busy)
        self.steps.append(state.step)
        try:
            assert self.open.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return self.real(folder, state, keep=keep)
        finally:
            self.busy -= 1


@dataclass
class Place:
    """A writer into a folder, its disk and what it told."""

    writer: StateWriter
    disk: Disk
    events: list[Event]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.fields) for event in self.events if event.kind == kind]

    def on_disk(self) -> TrainingState:
        found = load_newest(self.writer.folder, events=None)
        assert found is not None
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    seen: list[Event] = []
    disk = Disk()
    disk.open.set()
    monkeypatch.setattr(checkpoint_writer, "write_state", disk.write)
    events = EventStream(listeners=[seen.append])
    writer = StateWriter(folder=tmp_path / "states", keep=2, events=events)
    return Place(writer=writer, disk=disk, events=seen)


def test_training_goes_on_while_the_disk_writes(place: Place) -> None:
    place.disk.open.clear()
    weight = torch.ones(3, 2)
    place.writer.save(state_at(5, weight=weight), export=None)
    assert place.told("saved") == []
    assert not place.writer.folder.exists()
    weight += 7  # the next step
    place.disk.open.set()
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().adapter["a.down"].tolist() == torch.ones(3, 2).tolist()
    (saved,) = place.told("saved")
    assert (saved["step"], saved["state"], saved["export"]) == (5, "step-00000005", None)
    files = (place.writer.folder / "step-00000005").iterdir()
    assert saved["bytes"] == sum(path.stat().st_size for path in files)
    assert 0 <= saved["blocked_s"] <= saved["seconds"]


def test_saved_is_said_once_the_state_is_there_and_not_before(place: Place) -> None:
    seen: list[int] = []

    def listener(event: Event) -> None:
        if event.kind == "saved":
            seen.append(place.on_disk().step)

    place.writer.events.subscribe(listener)
    for step in (1, 2, 3):
        place.writer.save(state_at(step), export=None)
    place.writer.wait()
    assert seen == [1, 2, 3]


def test_one_save_at_a_time_and_none_is_left_out(place: Place) -> None:
    for step in range(1, 9):
        place.writer.save(state_at(step), export=None)
    place.writer.wait()
    assert place.disk.steps == list(range(1, 9))
    assert place.disk.most == 1
    assert sorted(path.name for path in place.writer.folder.glob("step-*")) == [
        "step-00000007",
        "step-00000008",
    ]


def test_memory_of_the_host_is_used_again(place: Place) -> None:
    place.writer.save(state_at(1), export=None)
    place.writer.wait()
    first = {name: copy.data_ptr() for name, copy in place.writer.copies.buffers.items()}
    place.writer.save(state_at(2), export=None)
    place.writer.wait()
    assert {name: copy.data_ptr() for name, copy in place.writer.copies.buffers.items()} == first
    assert len(first) == 3
    assert place.on_disk().adapter["a.down"].unique().tolist() == [2.0]


def test_tensors_that_change_shape_get_other_memory(place: Place) -> None:
    place.writer.save(state_at(1), export=None)
    place.writer.save(state_at(2, weight=torch.ones(5)), export=None)
    place.writer.wait()
    assert place.on_disk().adapter["a.down"].shape == (5,)


# ---- exports


def exporter(written: list[float], weight: torch.Tensor) -> Callable[[Copy], Callable[[], str]]:
    def copied(copy: Copy) -> Callable[[], str]:
        taken = copy("export.a", weight)

        def write() -> str:
            written.append(float(taken.sum()))
            return "a.safetensors"

        return write

    return copied


def test_the_export_is_of_the_same_moment(place: Place) -> None:
    place.disk.open.clear()
    weight, written = torch.ones(2), list[float]()
    place.writer.save(state_at(1), export=exporter(written, weight))
    weight += 5
    place.disk.open.set()
    place.writer.wait()
    assert written == [2.0]
    assert place.told("saved")[0]["export"] == "a.safetensors"


def test_an_export_that_fails_leaves_a_state_that_counts(place: Place) -> None:
    def refused() -> str:
        raise FULL

    place.writer.save(state_at(1), export=lambda copy: refused)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 1
    assert place.told("saved")[0]["export"] is None
    (problem,) = place.told("problem")
    assert "1 of 3 in a row" in problem["what"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=str
)
def test_an_export_without_memory_is_an_export_that_failed(place: Place, error: Exception) -> None:
    def refused() -> str:
        raise error

    place.writer.save(state_at(1), export=lambda copy: refused)
    place.writer.wait_for_acknowledgement()
    assert place.told("saved")[0]["step"] == place.on_disk().step == 1
    (problem,) = place.told("problem")
    assert "not enough memory for the exported file" in problem["what"]
    place.writer.save(state_at(2), export=None)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 2


# ---- a disk that refuses


def test_a_refused_save_is_a_problem_and_the_next_one_tries_again(place: Place) -> None:
    place.writer.save(state_at(1), export=None)
    place.writer.wait()
    place.disk.error = FULL
    place.writer.save(state_at(2), export=None)
    place.writer.wait()
    (problem,) = place.told("problem")
    assert problem["code"] == "CKP-03"
    assert "step 2" in problem["what"] and "0 bytes free" in problem["what"]
    assert place.on_disk().step == 1
    place.disk.error = None
    place.writer.save(state_at(3), export=None)
    place.writer.wait()
    assert place.writer.failures == 0
    assert place.on_disk().step == 3


def test_three_in_a_row_are_the_end(place: Place) -> None:
    place.disk.error = FULL
    for step in range(1, MAX_FAILURES + 1):
        place.writer.save(state_at(step), export=None)
    with pytest.raises(MachineError, match="No space"):
        place.writer.save(state_at(4), export=None)
    assert place.disk.steps == [1, 2, 3]


def test_the_last_save_is_tried_after_three_that_were_refused(place: Place) -> None:
    place.disk.error = FULL
    for step in range(1, MAX_FAILURES + 1):
        place.writer.save(state_at(step), export=None)
    place.writer.save(state_at(4), export=None, last=True)
    with pytest.raises(MachineError, match="No space"):
        place.writer.wait_for_acknowledgement()
    assert "step 4 failed (the last save)" in place.told("problem")[-1]["what"]
    place.disk.error = None
    place.writer.save(state_at(5), export=None, last=True)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 5


def test_a_state_without_memory_is_a_save_that_was_refused(place: Place) -> None:
    place.disk.error = MemoryError()
    place.writer.save(state_at(1), export=None)
    with pytest.raises(MachineError, match="not enough memory for the state"):
        place.writer.wait_for_acknowledgement()
    assert place.told("saved") == []
    place.disk.error = None
    place.writer.save(state_at(2), export=None)
    place.writer.wait_for_acknowledgement()
    assert place.writer.failures == 0


def test_who_needs_the_state_on_disk_learns_that_it_is_not(place: Place) -> None:
    place.disk.error = FULL
    place.writer.save(state_at(1), export=None)
    with pytest.raises(MachineError, match="No space"):
        place.writer.wait_for_acknowledgement()


def test_a_mistake_in_the_writer_is_no_silence(place: Place) -> None:
    place.disk.error = ZeroDivisionError("a bug")
    place.writer.save(state_at(1), export=None)
    with pytest.raises(ZeroDivisionError):
        place.writer.wait()
    place.writer.wait()  # it was said
    place.disk.error = None
    place.writer.save(state_at(2), export=None)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 2


def test_what_is_not_finite_is_neither_written_nor_remembered(place: Place) -> None:
    place.writer.remember(state_at(1))
    with pytest.raises(TrainingStopped, match="step 2 is not saved"):
        place.writer.save(state_at(2, weight=torch.full((3, 2), float("nan"))), export=None)
    place.writer.wait()
    assert place.disk.steps == []
    assert place.writer.newest().step == 1
    assert place.writer.newest().adapter["a.down"].unique().tolist() == [1.0]


# ---- the newest copy


def test_the_newest_copy_is_there_also_when_the_disk_refused_it(place: Place) -> None:
    place.disk.error = FULL
    place.writer.save(state_at(3), export=None)
    place.writer.wait()
    newest = place.writer.newest()
    assert (newest.step, newest.images_seen, newest.loop) == (
        3,
        12,
        LoopValues(guard={"kept": "f"}),
    )
    assert newest.optimizer["state"][0]["exp_avg"].unique().tolist() == [6.0]


def test_the_newest_copy_is_nobody_s_memory(place: Place) -> None:
    place.writer.remember(state_at(3))
    place.writer.newest().adapter["a.down"].zero_()
    place.writer.newest().optimizer["state"][0]["exp_avg"].zero_()
    newest = place.writer.newest()
    assert newest.adapter["a.down"].unique().tolist() == [3.0]
    assert newest.optimizer["state"][0]["exp_avg"].unique().tolist() == [6.0]
    assert place.disk.steps == []


# ---- the end of a run


@pytest.mark.parametrize("error", [None, FULL])
def test_the_end_waits_for_the_disk(place: Place, error: LoraTrainError | None) -> None:
    place.disk.open.clear()
    opener = threading.Timer(0.05, place.disk.open.set)
    try:
        with place.writer:
            place.writer.save(state_at(1), export=None)
            opener.start()
            if error is not None:
                raise error
    except MachineError:
        pass
    assert place.on_disk().step == 1


def test_quitting_at_once_does_not(place: Place) -> None:
    place.disk.open.clear()
    with pytest.raises(KeyboardInterrupt), place.writer:
        place.writer.save(state_at(1), export=None)
        raise KeyboardInterrupt
    assert place.told("saved") == []
    place.disk.open.set()
    place.writer.wait()
