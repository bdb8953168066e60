"""Saves in the background: what is written, when it counts, who waits, what a refusing disk does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.checkpoint.states import TrainingState, load_newest, write_state
from lora_trainer.checkpoint.writer import HostCopies, StateWriter
from lora_trainer.common.errors import MachineError
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.network import pinned_memory
from tests.fakes.pinning import pinning_driver
from tests.fakes.states import state_at

PATIENCE_S = 30.0
FULL = MachineError("cannot write: No space left on device (0 bytes free)", fix="free some space")


def filled(step: int, weight: torch.Tensor | None = None) -> TrainingState:
    """Return a state of one weight, which is the step where none is given, and its moments."""
    values = torch.full((3, 2), float(step)) if weight is None else weight
    moments = {"state": {0: {"exp_avg": values * 2, "step": torch.tensor(float(step))}}}
    return replace(state_at(step), adapter={"a.down": values}, optimizer=moments)


@dataclass
class Place:
    """A writer, its events, and its disk: each write waits for `open` and fails with `error`."""

    writer: StateWriter
    events: list[Event]
    open: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    steps: list[int] = field(default_factory=list)
    busy: int = 0

    def write(self, folder: Path, frozen: Any, *, keep: int) -> Path:
        self.busy += 1
        assert self.busy == 1, "one save at a time"
        self.steps.append(frozen.step)
        try:
            assert self.open.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return write_state(folder, frozen, keep=keep)
        finally:
            self.busy -= 1

    def save(self, step: int, *, weight: torch.Tensor | None = None, **options: Any) -> None:
        self.writer.save(filled(step, weight), **{"export": None, **options})

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.fields) for event in self.events if event.kind == kind]

    def on_disk(self) -> TrainingState:
        state = load_newest(self.writer.folder, events=None)
        assert state is not None
        return state


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    seen: list[Event] = []
    events = EventStream(listeners=[seen.append])
    place = Place(StateWriter(folder=tmp_path / "states", keep=2, events=events), seen)
    place.open.set()
    monkeypatch.setattr("lora_trainer.checkpoint.writer.write_state", place.write)
    with place.writer:
        yield place


def test_training_goes_on_while_state_and_export_of_one_moment_are_written(place: Place) -> None:
    place.open.clear()
    weight, written = torch.ones(3, 2), list[float]()

    def export(copy: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[], str]:
        taken = copy("export.a", weight)

        def write() -> str:
            written.append(float(taken.sum()))
            return "a.safetensors"

        return write

    place.save(5, weight=weight, export=export)
    assert place.told("saved") == []
    assert not place.writer.folder.exists()
    weight += 7  # the next step
    place.open.set()
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().adapter["a.down"].tolist() == torch.ones(3, 2).tolist()
    assert written == [6.0]
    (saved,) = place.told("saved")
    names = (saved["step"], saved["state"], saved["export"])
    assert names == (5, "step-00000005", "a.safetensors")
    files = (place.writer.folder / "step-00000005").iterdir()
    assert saved["bytes"] == sum(path.stat().st_size for path in files)
    assert 0 <= saved["blocked_s"] <= saved["seconds"]


def test_where_no_thread_can_start_it_is_written_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    place.writer.__exit__(None)
    with place.writer:
        place.save(3)
        assert place.on_disk().step == 3
        place.writer.wait_for_acknowledgement()


def test_all_saves_are_written_by_one_thread_that_is_there_before_the_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is used up, Python waits for ever for a thread to start."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("started in a save"))
    writers = set[str]()
    place.writer.events.subscribe(lambda _: writers.add(threading.current_thread().name))
    for step in (1, 2, 3):
        place.save(step)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 3 and writers == {"lora-train-state-writer"}
    place.writer.__exit__(None)
    assert "lora-train-state-writer" not in {each.name for each in threading.enumerate()}


def test_a_thread_that_memory_failed_still_does_the_next_save(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails outside of the write itself, as the report of it."""

    def emit(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(place.writer.events, "emit", emit)
        place.save(1)
        with pytest.raises(MemoryError):
            place.writer.wait()
    place.save(2)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 2


def test_a_state_saved_amid_skipped_steps_is_not_gone_back_to(place: Place) -> None:
    def save(step: int, *, skipped: int) -> None:
        state = replace(filled(step), guard={"skipped_in_row": skipped})
        place.writer.save(state, export=None)
        place.writer.wait_for_acknowledgement()

    save(1, skipped=0)
    save(2, skipped=1)
    good = place.writer.last_good()
    assert good.step == 1 and good.adapter["a.down"].unique().tolist() == [1.0]
    assert place.on_disk().step == 2
    save(3, skipped=0)
    assert place.writer.last_good().step == 3


def test_saved_is_said_once_the_state_is_there_and_none_is_left_out(place: Place) -> None:
    seen: list[int] = []

    def listener(event: Event) -> None:
        if event.kind == "saved":
            seen.append(place.on_disk().step)

    place.writer.events.subscribe(listener)
    for step in range(1, 9):
        place.save(step)
    place.writer.wait()
    assert seen == place.steps == list(range(1, 9))
    kept = sorted(path.name for path in place.writer.folder.glob("step-*"))
    assert kept == ["step-00000007", "step-00000008"]


def test_memory_of_the_host_is_used_again_for_tensors_of_the_same_shape(place: Place) -> None:
    addresses = []
    for step, weight in ((1, None), (2, None), (3, torch.ones(5))):
        place.save(step, weight=weight)
        place.writer.wait()
        buffers = place.writer.copies.buffers
        addresses.append({name: copy.data_ptr() for name, copy in buffers.items()})
        if step == 2:
            assert place.on_disk().adapter["a.down"].unique().tolist() == [2.0]
    assert addresses[0] == addresses[1] and len(addresses[0]) == 3
    assert place.on_disk().adapter["a.down"].shape == (5,)


def test_an_export_that_fails_leaves_a_state_that_counts(place: Place) -> None:
    """For lack of memory; of a full disk: tests/test_run.py."""

    def refused() -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    place.save(1, export=lambda copy: refused)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 1
    (saved,) = place.told("saved")
    assert (saved["step"], saved["export"]) == (1, None)
    (problem,) = place.told("problem")
    assert "1 of 3 in a row" in problem["what"] and "not enough memory" in problem["what"]


# ---- a disk that refuses


@pytest.mark.parametrize(
    ("error", "message"), [(FULL, "0 bytes free"), (MemoryError(), "not enough memory to write")]
)
def test_a_refused_save_is_a_problem_and_the_next_one_tries_again(
    place: Place, error: BaseException, message: str
) -> None:
    place.save(1)
    place.writer.wait()
    place.error = error
    place.save(2)
    with pytest.raises(MachineError, match="No space|not enough memory"):
        place.writer.wait_for_acknowledgement()
    (problem,) = place.told("problem")
    assert problem["code"] == "CKP-03"
    assert "step 2" in problem["what"] and message in problem["what"]
    assert place.on_disk().step == 1
    place.error = None
    place.save(3)
    place.writer.wait_for_acknowledgement()
    assert place.writer.failures == 0
    assert place.on_disk().step == 3


def test_three_in_a_row_are_the_end_but_the_last_save_is_tried(place: Place) -> None:
    place.error = FULL
    for step in (1, 2, 3):
        place.save(step)
    with pytest.raises(MachineError, match="No space"):
        place.save(4)
    assert place.steps == [1, 2, 3]
    place.save(4, last=True)
    with pytest.raises(MachineError, match="No space"):
        place.writer.wait_for_acknowledgement()
    assert "step 4 failed (the last save)" in place.told("problem")[-1]["what"]
    place.error = None
    place.save(5, last=True)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 5


def test_a_mistake_in_the_writer_is_no_silence(place: Place) -> None:
    place.error = ZeroDivisionError("a bug")
    place.save(1)
    with pytest.raises(ZeroDivisionError):
        place.writer.wait()
    place.writer.wait()  # it was said
    place.error = None
    place.save(2)
    place.writer.wait_for_acknowledgement()
    assert place.on_disk().step == 2


def test_the_newest_copy_is_nobody_s_memory_and_there_also_when_the_disk_refused_it(
    place: Place,
) -> None:
    place.error = FULL
    place.save(3)
    place.writer.wait()
    place.writer.last_good().adapter["a.down"].zero_()
    place.writer.last_good().optimizer["state"][0]["exp_avg"].zero_()
    newest = place.writer.last_good()
    assert (newest.step, newest.images_seen) == (3, 12)
    assert newest.guard == state_at(3).guard
    assert newest.adapter["a.down"].unique().tolist() == [3.0]
    assert newest.optimizer["state"][0]["exp_avg"].unique().tolist() == [6.0]


def test_the_end_waits_for_the_disk(place: Place) -> None:
    place.open.clear()
    with pytest.raises(ZeroDivisionError), place.writer:
        place.save(1)
        threading.Timer(0.05, place.open.set).start()
        raise ZeroDivisionError
    assert place.on_disk().step == 1


def test_the_copies_of_a_save_lie_in_few_pieces_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state has thousands of tensors, and each request to pin memory stops a GPU for a moment."""
    driver = pinning_driver(monkeypatch)
    pinned: list[int] = []
    empty = driver.empty
    monkeypatch.setattr(
        pinned_memory,
        "_empty",
        lambda shape, *rest, pin: (
            (pinned.append(shape[0]) if pin else None) or empty(shape, *rest, pin=pin)
        ),
    )
    shapes = [(16, 320), (7,), (3, 5, 2), (1280,)]
    dtypes = [torch.float32, torch.uint8, torch.float32, torch.bfloat16]
    tensors = {
        f"{number}.{kind}": torch.full(shape, number % 7, dtype=dtype)
        for number in range(300)
        for kind, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    copies = HostCopies()
    for _ in range(2):
        taken = {name: copies.take(name, tensor) for name, tensor in tensors.items()}
        copies.mark()
        assert all(torch.equal(taken[name], tensor) for name, tensor in tensors.items())
    assert len(tensors) == 1200 and len(pinned) <= 4
    starts = [tensor.data_ptr() for tensor in taken.values()]
    assert len(set(starts)) == len(starts) and all(start % 16 == 0 for start in starts)
