"""The queue: what is added stays, in its order, whoever writes; what its worker starts and survives."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.hardware.machine import Hardware
from lora_trainer.queue import commands, rules
from lora_trainer.queue import worker as queue_worker
from lora_trainer.reporting.control import Control
from tests.fakes.live_runs import write_status
from tests.fakes.plans import machine
from tests.fakes.queues import FAKE_TRAINER, WORKER_PROGRAM, Place, until
from tests.fakes.runs import ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    place = Place(folder=tmp_path)
    yield place
    place.clean_up()


def ids(place: Place) -> list[str]:
    return [item.id for item in commands.items(place.runs)]


def trains(place: Place, item: commands.Item) -> bool:
    """Say whether the run of an item is seen: its trainer waits for its file then."""
    return place.item(item.id).run is not None


# ---- when


def test_nothing_starts_while_the_queue_is_paused_by_day_or_beside_other_programs(
    place: Place,
) -> None:
    noon_s = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
    place.add("a")
    worker = place.worker()
    worker.clock = lambda: noon_s
    rules.pause(place.runs, stop=False)
    assert worker.tick() and place.states() == {"a": "waiting"}
    rules.change_when(place.runs, when="night", night=(22, 7))
    rules.go_on(place.runs)
    assert worker.tick() and place.states() == {"a": "waiting"}
    worker.clock = lambda: noon_s + 11 * 3600
    rules.change_when(place.runs, when="idle")
    worker.is_idle = lambda: False
    assert worker.tick() and place.states() == {"a": "waiting"}
    worker.is_idle = lambda: True
    place.finish(worker)
    assert place.states() == {"a": "finished"}


@pytest.mark.parametrize(
    ("night", "hours"),
    [((22, 7), {22, 23, *range(7)}), ((1, 4), {1, 2, 3}), ((5, 5), set(range(24)))],
)
def test_a_night_may_pass_midnight(night: tuple[int, int], hours: set[int]) -> None:
    kept = rules.Rules(when="night", night_from=night[0], night_to=night[1])
    assert {hour for hour in range(24) if kept.is_night(hour)} == hours


def test_a_pause_of_all_stops_what_trains_and_it_goes_on_before_the_others(place: Place) -> None:
    a, b = place.add("a"), place.add("b")
    run = place.runs / "a"
    run.mkdir()
    write_status(run)
    place.become(a, state="running", run="a")
    rules.pause(place.runs, stop=True)
    assert "stop" in Control(run).pending()
    rules.go_on(place.runs)
    assert rules.read_rules(place.runs).stopped == (a.id,), "it still saves"
    write_status(run, state="stopped", exit_code=0)
    place.become(place.item(a.id), state="stopped")
    rules.take_up_stopped(place.runs)
    assert [item.id for item in commands.in_order(commands.items(place.runs))] == [a.id, b.id]
    assert "--resume-from" in place.item(a.id).argv
    assert rules.read_rules(place.runs) == rules.Rules()


def test_a_machine_is_idle_only_when_nothing_has_used_it_for_a_while() -> None:
    loads = [0.0] * (queue_worker.IDLE_LOOKS - 1) + [0.5] + [0.0] * queue_worker.IDLE_LOOKS
    left, found = iter(loads), machine()

    def look() -> Hardware:
        load = next(left)
        gpus = tuple(replace(gpu, busy_fraction=load) for gpu in found.gpus)
        return replace(found, gpus=gpus, busy_processors=4 * load)

    quiet = queue_worker.Quiet(hardware=look)
    assert [quiet.lasts() for _ in loads] == [*[False] * (len(loads) - 1), True]


# ---- starting


def test_a_trainer_gets_its_words_no_input_and_a_session_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    words = [
        "two words",
        "--flag",
        "a\nb",
        "$(touch pwned)",
        "; touch pwned",
        "'\"\\",
        "*",
        "",
        "é",
    ]
    item = place.add("a", *words, until=str(place.let("a")))
    place.add("b")
    worker = place.worker()
    until(lambda: worker.tick() and trains(place, item))
    pid = place.item(item.id).pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    assert place.states() == {"a": "running", "b": "waiting"}
    place.let("a").touch()
    place.finish(worker)
    given = {"words": words, "device": "as it was", "is_offline": True}  # as the tests are
    assert place.given("a") == given, "the only device"
    assert not list(place.folder.rglob("pwned"))
    ended = place.item(item.id)
    assert ended.added_s <= (ended.started_s or 0) <= (ended.ended_s or 0)


# ---- ending


ENDS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "done": ({"exit": 0, "say": "done"}, 0, "finished", ""),
    "asked": ({"exit": 143, "say": "error: asked to stop"}, 143, "stopped", ""),
    "input": ({"exit": 3, "say": "error: no images. Fix: give some."}, 3, "failed", "no images. Fix: give some."),
    "red": ({"exit": 1, "say": "a\x1b[31mred\x07"}, 1, "failed", "a?[31mred?"),
    "silent": ({"exit": 4}, 4, "failed", "step 1"),
    "killed": ({"until": "never"}, -signal.SIGKILL, "interrupted", "the machine ran out of memory"),
    "ended": ({"until": "never"}, -signal.SIGTERM, "stopped", ""),
    "crashed": ({"until": "never"}, -signal.SIGSEGV, "failed", f"signal {int(signal.SIGSEGV)}"),
}  # fmt: skip


def test_the_exit_code_is_the_state_and_the_last_line_the_reason_and_a_signal_is_told(
    place: Place,
) -> None:
    lost = commands.add(place.runs, ["x"], label="lost", folder=place.folder / "gone")
    ids = {name: place.add(name, **orders).id for name, (orders, *_) in ENDS.items()}
    worker = place.worker(*"12345678")
    signalled = {name: -code for name, (_, code, *_) in ENDS.items() if code < 0}
    until(lambda: worker.tick() and all(trains(place, place.item(ids[n])) for n in signalled))
    devices = [place.item(ids[name]).device for name in signalled]
    assert len(set(devices)) == len(devices), "one training each"
    for name, number in signalled.items():
        os.kill(place.item(ids[name]).pid or 0, number)
    place.finish(worker)
    assert place.item(lost.id).state == "failed"
    assert re.search("cannot be started in .*gone", place.item(lost.id).error)
    for name, (_, code, state, error) in ENDS.items():
        ended = place.item(ids[name])
        assert (ended.state, ended.exit_code, ended.run) == (state, code, name)
        assert error == ended.error if code >= 0 or not error else error in ended.error


def test_the_reason_is_of_this_start_not_of_one_before(place: Place) -> None:
    item = place.add("a", until=str(place.let("a")), exit=3, say="first")
    worker = place.worker()
    place.let("a").touch()
    place.finish(worker)
    assert place.item(item.id).error == "first"
    commands.again(place.runs, item.id)
    worker.trainer = (sys.executable, "-c", "raise SystemExit(1)")
    place.finish(worker)
    assert place.item(item.id).error == "the trainer ended with exit code 1 and no message"
    assert "first" in commands.item_file(place.runs, item.id, "log").read_text(), "kept"


def test_a_full_disk_delays_what_is_written_and_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = place.add("a")
    worker = place.worker()
    full = True

    def refuse_if_full(runs: Path, item: commands.Item) -> None:
        if full and item.pid is not None:
            raise MachineError("cannot write: 0 bytes free", fix="free some space")
        real(runs, item)

    real = queue_worker.write
    monkeypatch.setattr(queue_worker, "write", refuse_if_full)
    with pytest.raises(MachineError):
        worker.tick()
    child = worker.children[item.id].process
    child.wait()
    with pytest.raises(MachineError):
        worker.tick()
    full = False
    place.finish(worker)
    ended = place.item(item.id)
    assert (ended.state, ended.run, ended.exit_code) == ("finished", "a", 0)


# ---- dying


def test_a_training_outlives_its_worker_and_the_next_one_waits_for_it(place: Place) -> None:
    first = place.add("a", until=str(place.let("a")))
    place.add("b")
    with place.worker_process() as process:
        until(lambda: trains(place, first))
        process.kill()
    (place.runs / ".queue" / ".worker.log").write_text(f"{first.id} started, process 5\n")
    assert queue_worker.worker_fault(place.runs) == "", "it was killed at its work"
    began = place.item(first.id)
    pid = began.pid
    worker = place.worker()
    for _ in range(3):
        assert worker.tick()
    assert place.states() == {"a": "running", "b": "waiting"}
    assert place.item(first.id).pid == pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    # One killed before it wrote the process down: nothing is started twice.
    place.become(began, pid=None, pid_started_s=None, run=None)
    assert worker.tick() and trains(place, first)
    assert place.item(first.id).pid == pid
    place.let("a").touch()
    place.finish(worker)
    assert place.states() == {"b": "finished", "a": "finished"}


def test_an_end_that_nobody_saw_is_told_by_its_own_run(place: Place) -> None:
    no_status = "the trainer ended while no worker was running, without a final status"
    unseen: dict[str, tuple[dict[str, Any], str, int | None, str]] = {
        "done": ({}, "finished", 0, ""),
        "nan": ({"state": "failed", "exit": 5, "say": "nan"}, "failed", 5, "nan"),
        "lost": ({"state": "training", "exit": 1}, "interrupted", None, no_status),
        "elsewhere": ({}, "interrupted", None, no_status),
    }
    ids = {
        name: place.add(name, until=str(place.let(name)), **orders).id
        for name, (orders, *_) in unseen.items()
    }
    worker = place.worker(*"1234")
    until(lambda: worker.tick() and all(trains(place, place.item(id)) for id in ids.values()))
    os.kill(place.item(ids["elsewhere"]).pid or 0, signal.SIGKILL)
    for name in ("done", "nan", "lost"):
        place.let(name).touch()
    for child in worker.children.values():
        child.process.wait()
    # A run that went on in another process does not speak for the item.
    write_status(
        place.runs / "elsewhere", state="finished", exit_code=0, message="by another process"
    )
    assert set(place.states().values()) == {"running"}, "as the dead worker left it"
    queue_worker.settle(place.runs)
    for name, (_, state, code, error) in unseen.items():
        ended = place.item(ids[name])
        assert (ended.state, ended.exit_code, ended.error) == (state, code, error)


def test_after_a_reboot_what_ran_is_interrupted_and_what_waits_goes_on(place: Place) -> None:
    first, unborn = place.add("a"), place.add("unborn")
    place.add("b")
    mine = psutil.Process()
    # Another process has the number now.
    again = {"pid": mine.pid, "pid_started_s": mine.create_time() - 3600}
    place.become(first, state="running", started_s=1.0, run="a", **again)
    place.become(unborn, state="running", started_s=1.0)
    place.finish(place.worker())
    assert place.states() == {"b": "finished", "a": "interrupted", "unborn": "interrupted"}
    assert not (place.runs / "unborn").exists(), "it might have run already: people decide"


# ---- one worker


def test_there_is_one_worker_and_it_ends_by_itself(place: Place) -> None:
    queue_worker.ensure_worker(place.runs, program=("no such program",))
    assert commands.items(place.runs) == () and not place.runs.exists(), "nothing was ever added"
    place.add("a", until=str(place.let("a")))
    queue_worker.ensure_worker(place.runs, program=WORKER_PROGRAM)
    pid = queue_worker.worker_pid(place.runs)
    assert pid is not None
    assert os.getsid(pid) == pid
    note = json.loads((place.runs / ".queue" / ".worker.json").read_bytes())
    started_s = psutil.Process(pid).create_time()
    assert note == {"pid": pid, "pid_started_s": started_s}, "other versions read it"
    queue_worker.ensure_worker(place.runs, program=("no such program",))
    assert queue_worker.worker_pid(place.runs) == pid
    until(lambda: place.states()["a"] == "running")
    with pytest.raises(RequestError, match=f"process {pid}"):
        queue_worker.work(place.runs, devices=[""])
    until(lambda: queue_worker.worker_pid(place.runs) == pid, what="the worker to say so again")
    place.let("a").touch()
    until(lambda: queue_worker.worker_pid(place.runs) is None)
    assert place.states() == {"a": "finished"}
    queue_worker.ensure_worker(place.runs, program=("no such program",))


def test_a_worker_that_dies_at_once_is_not_started_by_every_look(place: Place) -> None:
    place.add("a")
    broken = (sys.executable, "-c", "import sys; sys.exit('error: torch is broken')")
    queue_worker.ensure_worker(place.runs, program=broken)
    until(lambda: queue_worker.worker_pid(place.runs) is None)
    assert queue_worker.worker_fault(place.runs) == "torch is broken"
    (place.runs / ".queue" / ".worker.log").write_text("")
    assert queue_worker.worker_fault(place.runs) == "it left no message"
    began_s = time.time()
    absent = partial(queue_worker.ensure_worker, place.runs, program=("no such program",))
    absent(clock=lambda: began_s + 5.0)
    with pytest.raises(MachineError, match="no such program|No such file"):
        absent(clock=lambda: began_s + 11.0)
    queue_worker.ensure_worker(place.runs, program=WORKER_PROGRAM, clock=lambda: began_s + 11.0)
    until(lambda: place.states() == {"a": "finished"})
    assert queue_worker.worker_fault(place.runs) == ""
    until(lambda: queue_worker.worker_pid(place.runs) is None)


def test_a_damaged_note_of_the_worker_is_replaced_and_a_full_disk_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("a")
    note = place.runs / ".queue" / ".worker.json"
    for damaged in (b'{"pid": -5}', b"[-5, 1.0]", b'{"pid": 5, "pid_started_s": NaN}'):
        note.write_bytes(damaged)
        assert queue_worker.worker_pid(place.runs) is None
    seen: list[int | None] = []
    said: list[str] = []
    tick = queue_worker.Worker.tick

    def sleep(_: float) -> None:
        seen.append(queue_worker.worker_pid(place.runs))

    def full_at_first(worker: queue_worker.Worker) -> bool:
        if len(seen) < 3:
            raise MachineError("cannot write: 0 bytes free", fix="free some space")
        return tick(worker)

    monkeypatch.setattr(queue_worker.Worker, "tick", full_at_first)
    queue_worker.work(place.runs, trainer=FAKE_TRAINER, devices=[""], say=said.append, sleep=sleep)
    assert place.states() == {"a": "finished"}
    assert sum("0 bytes free" in line for line in said) == 1, "said once"
    assert seen[0] == os.getpid() and queue_worker.worker_pid(place.runs) is None


def test_what_comes_while_a_worker_retires_is_worked_on(place: Place) -> None:
    """The last poll finds nothing; before the worker says that it is gone, somebody adds."""
    real = queue_worker.changing
    late = []

    def add_before_the_lock(runs: Path) -> Any:
        if not late:
            late.append(True)
            place.add("late")
        return real(runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_worker, "changing", add_before_the_lock)
        queue_worker.work(
            place.runs, trainer=FAKE_TRAINER, devices=[""], sleep=lambda _: None, idle_polls=2
        )
    assert place.states() == {"late": "finished"}


def test_a_worker_whose_queue_was_deleted_ends(place: Place) -> None:
    place.add("a")
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        for file in (place.runs / ".queue").glob(".worker.lock"):
            file.unlink()

    queue_worker.work(place.runs, trainer=FAKE_TRAINER, devices=[], sleep=sleep, stop=lambda: None)
    assert len(polls) == 1


# ---- devices


def test_a_training_started_by_hand_takes_a_device_and_each_downloads_as_the_switch_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")  # of the tests, which no switch takes back
    by_hand = place.runs / "by-hand"  # its process is this one
    by_hand.mkdir(parents=True)
    write_status(by_hand, state="training", exit_code=None, message="")
    for name in "ab":
        place.add(name)
    assert place.worker().tick() and set(place.states().values()) == {"waiting"}
    worker = place.worker("0", "1")
    assert queue_worker.outside(place.runs, ()) == ("by-hand",)
    rules.switch_offline(place.runs, offline=True)
    until(lambda: worker.tick() and place.item("0001-a").has_ended)
    assert place.given("a")["device"] == "1", "CUDA's first GPU is where one trains by itself"
    assert place.given("a")["is_offline"]
    write_status(by_hand, state="finished", exit_code=0, message="")
    place.finish(worker)


def test_one_slot_a_usable_card() -> None:
    one = machine()
    for uuids, visible, expected in (
        (["GPU-a"], "3", ("",)),
        (["", ""], None, ("0", "1")),
        (["GPU-c", "GPU-a"], " 2,GPU-a,nonsense", ("2", "GPU-a")),
        ([], None, ("",)),
    ):
        gpus = [replace(one.gpus[0], index=index, uuid=uuid) for index, uuid in enumerate(uuids)]
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert queue_worker.slots(replace(one, gpus=tuple(gpus)), environment) == expected


# ---- the files


def test_items_are_named_after_their_number_and_label(place: Place) -> None:
    names, expected = ("My cat!", "小猫", "../../etc"), ["0001-my-cat", "0002-training", "0003-etc"]
    assert [place.add(name).id for name in names] == expected
    assert place.add("x" * 300).id == f"0004-{'x' * 40}"
    assert place.item("0002-training").label == "小猫"
    assert len(place.item(f"0004-{'x' * 40}").label) == 200


def test_the_same_training_twice_is_refused_until_it_has_ended(place: Place) -> None:
    item = place.add("a")
    for state in ("waiting", "running"):
        place.become(item, state=state)
        with pytest.raises(RequestError, match=f"in the queue already: {item.id}, {state}"):
            place.add("a")
    for change in (commands.remove, partial(commands.move, by=1)):
        with pytest.raises(RequestError, match="is running"):
            change(place.runs, item.id)
    other = commands.add(place.runs, item.argv, label="a", folder=place.folder / "elsewhere")
    place.become(item, state="failed", ended_s=1.0)
    assert [found.id for found in commands.items(place.runs) if not found.has_ended] == [other.id]
    assert place.add("a").id == "0003-a"


def test_words_that_no_process_takes_are_refused(place: Place) -> None:
    for words, label in ((["a\0b"], "a"), (["\ud800"], "a"), ([], "\ud800")):
        with pytest.raises(RequestError, match="cannot be part of a command"):
            commands.add(place.runs, ["dataset", *words], label=label)
    assert ids(place) == []


def test_many_can_add_at_once(place: Place) -> None:
    threads = [threading.Thread(target=place.add, args=(f"t{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    items = commands.items(place.runs)
    assert sorted(item.label for item in items) == sorted(f"t{number}" for number in range(12))
    assert sorted(item.order for item in items) == list(range(1, 13))


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


def test_only_what_is_listed_can_be_named(place: Place) -> None:
    place.add("a")
    outside = place.runs / "outside.json"
    outside.write_text("{}")
    move = partial(commands.move, by=1)
    for name in ("../outside", ""):
        for change in (commands.remove, commands.again, move):
            with pytest.raises(RequestError, match="the queue has no item"):
                change(place.runs, name)
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
    "cut": b'{"id": "0001-a", "order',
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
    (place.runs / ".queue" / f"{item.id}.log").mkdir()
    for id, name in (("0007-odd", "0007-odd.json"), (item.id, f"{item.id}.log")):
        with pytest.raises(MachineError, match=rf"{name}.* move the folder"):
            commands.remove(place.runs, id)
        assert (place.runs / ".queue" / name).is_dir()
    assert ids(place) == [item.id, "0007-odd"]
    blocked = Place(folder=place.folder / "blocked")
    blocked.runs.mkdir(parents=True)
    (blocked.runs / ".queue").write_text("a file")
    for use in (lambda: commands.items(blocked.runs), lambda: blocked.add("a")):
        with pytest.raises(MachineError, match=r"\.queue"):
            use()


# ---- any sequence


class _FakeWorker(queue_worker.Worker):
    """Its trainings last until the test gives them an exit code."""

    def spawn(self, item: commands.Item) -> queue_worker.Child:
        process: Any = SimpleNamespace(pid=os.getpid(), code=None)
        process.poll = lambda: process.code
        return queue_worker.Child(process=process, started_s=0.0, log_from_bytes=0)


class QueueMachine(RuleBasedStateMachine):
    """Every sequence of orders and polls, against two lists and a set."""

    SLOTS = ("0", "1")

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.place = Place(folder=Path(self.temporary.name))
        clock = map(float, count(1))
        self.worker = _FakeWorker(runs=self.place.runs, slots=self.SLOTS, clock=lambda: next(clock))
        self.numbers = count(1)
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.ended: list[str] = []

    def teardown(self) -> None:
        self.temporary.cleanup()

    @rule()
    def add(self) -> None:
        self.waiting.append(self.place.add(f"t{next(self.numbers)}").id)

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
