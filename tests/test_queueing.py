"""The files of the queue: what is added stays, in its order, whatever lies beside it and whoever else writes."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.queue import commands, worker
from tests.fakes.queues import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path)


def ids(place: Place) -> list[str]:
    return [item.id for item in commands.items(place.runs)]


# ---- adding


def test_a_queue_that_was_never_used_is_empty_and_stays_absent(place: Place) -> None:
    assert commands.items(place.runs) == ()
    assert worker.worker_pid(place.runs) is None
    worker.ensure_worker(place.runs, program=("no such program",))
    assert not place.runs.exists()


def test_items_are_named_after_their_number_and_label(place: Place) -> None:
    assert [place.add(name).id for name in ("My cat!", "小猫", "../../etc", "x" * 300)] == [
        "0001-my-cat",
        "0002-training",
        "0003-etc",
        f"0004-{'x' * 40}",
    ]
    assert place.item("0002-training").label == "小猫"
    assert len(place.item(f"0004-{'x' * 40}").label) == 200


def test_the_same_training_twice_is_refused_until_it_has_ended(place: Place) -> None:
    item = place.add("a")
    for state in ("waiting", "running"):
        place.become(item, state=state)
        with pytest.raises(RequestError, match=f"in the queue already: {item.id}, {state}"):
            place.add("a")
    for change in (commands.remove, lambda runs, id: commands.move(runs, id, by=1)):
        with pytest.raises(RequestError, match="is running"):
            change(place.runs, item.id)
    other = commands.add(place.runs, item.argv, label="a", folder=place.folder / "elsewhere")
    place.become(item, state="failed", ended_s=1.0)
    assert [found.id for found in commands.items(place.runs) if not found.has_ended] == [other.id]
    assert place.add("a").id == "0003-a"


@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_words_that_no_process_takes_are_refused(word: str, place: Place) -> None:
    with pytest.raises(RequestError, match="cannot be part of a command"):
        commands.add(place.runs, ["dataset", word], label="a")
    with pytest.raises(RequestError, match="cannot be part of a command"):
        commands.add(place.runs, ["dataset"], label=word)
    assert ids(place) == []


def test_many_can_add_at_once(place: Place) -> None:
    threads = [threading.Thread(target=place.add, args=(f"t{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = commands.items(place.runs)
    assert sorted(item.label for item in found) == sorted(f"t{number}" for number in range(12))
    assert sorted(item.order for item in found) == list(range(1, 13))


# ---- moving, removing, again


def test_removing_takes_the_log_along_leaves_the_run_and_frees_no_name(place: Place) -> None:
    place.add("a")
    item = place.become(place.add("b"), state="failed", run="b")
    log = commands.item_file(place.runs, item.id, "log")
    log.write_text("said")
    (place.runs / "b").mkdir()
    commands.remove(place.runs, item.id)
    assert not log.exists() and (place.runs / "b").is_dir()
    assert place.add("b").id == "0003-b"
    (place.runs / ".queue" / ".last-number").write_bytes(b"\xff")
    assert place.add("c").id == "0004-c", "the items count where the counter is damaged"


@pytest.mark.parametrize("name", ["../outside", ""])
def test_only_what_is_listed_can_be_named(name: str, place: Place) -> None:
    place.add("a")
    outside = place.runs / "outside.json"
    outside.write_text("{}")
    for change in (commands.remove, commands.again):
        with pytest.raises(RequestError, match="there is no item"):
            change(place.runs, name)
    with pytest.raises(RequestError, match="there is no item"):
        commands.move(place.runs, name, by=1)
    assert outside.exists() and len(ids(place)) == 1


def test_one_that_ended_early_goes_on_with_its_run(place: Place) -> None:
    state: Any = "failed"
    first, item = place.add("b"), place.add("a", "--name", "a")
    (place.runs / "a").mkdir()
    place.become(item, state=state, run="a", ended_s=1.0, exit_code=5, error="nan", pid=7)
    waiting = commands.again(place.runs, item.id)
    assert waiting.argv == ("--resume-from", str(place.runs / "a"), *item.argv)
    assert (waiting.state, waiting.pid, waiting.exit_code) == ("waiting", None, None)
    assert waiting.error == ""
    assert ids(place) == [first.id, item.id]
    with pytest.raises(RequestError, match="waiting already"):
        commands.again(place.runs, item.id)
    place.become(waiting, state=state, run="a", ended_s=2.0)
    assert commands.again(place.runs, item.id).argv == waiting.argv, "not resumed twice over"
    for ended in ({"state": "finished", "run": "a"}, {"state": "interrupted", "run": "gone"}):
        place.become(item, ended_s=1.0, **ended)
        assert commands.again(place.runs, item.id).argv == item.argv, (
            "there is no run to go on with"
        )


# ---- damaged

DAMAGE = {
    "empty": b"",
    "cut": b'{"id": "0001-a", "order',
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a state of its own": {"state": "lost"},
    "a number that is none": {"added_s": float("nan")},
    "a huge process": {"pid": 2**80},
    "a time beyond calendars": {"ended_s": 1e300},
    "a run above": {"run": ".."},
    "half a character": b'{"label": "\\ud800"}',
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_item_has_failed_and_blocks_nobody(name: str, place: Place) -> None:
    first, second = place.add("a"), place.add("b")
    file = place.runs / ".queue" / f"{first.id}.json"
    damage = DAMAGE[name]
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(file.read_bytes()), **damage}).encode()
    file.write_bytes(damage)
    waiting, damaged = commands.items(place.runs)
    assert (waiting.id, damaged.id, damaged.state) == (second.id, first.id, "failed")
    assert damaged.error.startswith(f"{file.name} is damaged: ")
    assert damaged.error.isprintable()
    with pytest.raises(RequestError, match="remove it and add"):
        commands.again(place.runs, first.id)
    commands.move(place.runs, second.id, by=-1)
    assert place.add("c").id == "0003-c"
    commands.remove(place.runs, first.id)
    assert ids(place) == [second.id, "0003-c"]


def test_other_files_are_no_items_and_a_folder_in_the_place_of_one_is_damage(place: Place) -> None:
    item = place.add("a")
    for name in ("notes.json", "0001-a.json~", "0001-a b.json", "1234567890.json"):
        (place.runs / ".queue" / name).write_text("{}")
    assert ids(place) == [item.id]
    (place.runs / ".queue" / "0007-odd.json").mkdir()
    assert [item.state for item in commands.items(place.runs)] == ["waiting", "failed"]
    with pytest.raises(MachineError):
        commands.remove(place.runs, "0007-odd")
    blocked = Place(folder=place.folder / "blocked")
    blocked.runs.mkdir(parents=True)
    (blocked.runs / ".queue").write_text("a file")
    for use in (lambda: commands.items(blocked.runs), lambda: blocked.add("a")):
        with pytest.raises(MachineError, match=r"\.queue"):
            use()


# ---- any sequence


class _Process:
    """A training that lasts until the test ends it."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class _FakeWorker(worker.Worker):
    def spawn(self, item: commands.Item) -> worker.Child:
        process: Any = _Process()
        return worker.Child(process=process, started_s=0.0, log_from_bytes=0)


class QueueMachine(RuleBasedStateMachine):
    """Every sequence of orders and polls, against two lists and a set."""

    SLOTS = ("0", "1")

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.place = Place(folder=Path(self.temporary.name))
        self.clock_s = 0.0
        self.worker = _FakeWorker(runs=self.place.runs, slots=self.SLOTS, clock=self.tick_clock)
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.ended: list[str] = []
        self.added = 0

    def tick_clock(self) -> float:
        self.clock_s += 1.0
        return self.clock_s

    def teardown(self) -> None:
        self.temporary.cleanup()

    @rule()
    def add(self) -> None:
        self.added += 1
        self.waiting.append(self.place.add(f"t{self.added}").id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), by=st.sampled_from([-2, -1, 1, 2]))
    def move(self, data: st.DataObject, by: int) -> None:
        chosen = data.draw(st.sampled_from(self.waiting))
        commands.move(self.place.runs, chosen, by=by)
        place = self.waiting.index(chosen)
        self.waiting.remove(chosen)
        self.waiting.insert(max(0, place + by), chosen)

    @precondition(lambda self: self.waiting or self.ended)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.waiting + self.ended))
        commands.remove(self.place.runs, chosen)
        (self.waiting if chosen in self.waiting else self.ended).remove(chosen)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.ended))
        commands.again(self.place.runs, chosen)
        self.ended.remove(chosen)
        self.waiting.append(chosen)

    @rule()
    def poll(self) -> None:
        self.worker.tick()
        while self.waiting and len(self.running) < len(self.SLOTS):
            self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 143, -9]))
    def end(self, data: st.DataObject, code: int) -> None:
        chosen = data.draw(st.sampled_from(self.running))
        process: Any = self.worker.children[chosen].process
        process.code = code
        self.running.remove(chosen)
        self.ended.insert(0, chosen)
        self.poll()

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        found = commands.items(self.place.runs)
        assert [item.id for item in found] == self.running + self.waiting + self.ended
        devices = [item.device for item in found if item.state == "running"]
        assert len(set(devices)) == len(devices), "one training a device"


QueueMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestQueueMachine = QueueMachine.TestCase
