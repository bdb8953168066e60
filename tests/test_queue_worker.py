"""The worker with real processes: what starts when, what is written down, what survives which death."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.queue import commands
from lora_trainer.queue import worker as queue_worker
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


def trains(place: Place, item: commands.Item) -> bool:
    """Say whether the run of an item is seen: its trainer waits for its file then."""
    return place.item(item.id).run is not None


def gone(pid: int | None) -> bool:
    return pid is None or not psutil.pid_exists(pid) or is_zombie(pid)


def is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


# ---- starting


def test_one_after_another_in_their_order(place: Place) -> None:
    first = place.add("a", until=str(place.let("a")))
    place.add("b")
    place.add("c")
    worker = place.worker()
    until(lambda: worker.tick() and trains(place, first))
    assert place.states() == {"a": "running", "b": "waiting", "c": "waiting"}
    commands.move(place.runs, "0003-c", by=-1)
    place.let("a").touch()
    place.finish(worker)
    assert place.states() == {"b": "finished", "c": "finished", "a": "finished"}, "newest end first"
    ended = place.item(first.id)
    assert (ended.run, ended.exit_code, ended.error) == ("a", 0, "")
    assert ended.added_s <= (ended.started_s or 0) <= (ended.ended_s or 0)


WORDS = (
    "two words",
    "--flag",
    "a\nb",
    "$(touch pwned)",
    "; touch pwned",
    "'\"\\",
    "*",
    "",
    "é小猫",
)


def test_a_trainer_gets_its_words_no_input_and_a_session_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    item = place.add("a", *WORDS, until=str(place.let("a")))
    worker = place.worker()
    until(lambda: worker.tick() and trains(place, item))
    pid = place.item(item.id).pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    place.let("a").touch()
    place.finish(worker)
    assert place.given("a") == {"words": list(WORDS), "device": "as it was"}, "the only device"
    assert not list(place.folder.rglob("pwned"))


# ---- ending


ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "done": ({"exit": 0, "say": "done"}, "finished", ""),
    "asked": ({"exit": 143, "say": "error: asked to stop"}, "stopped", ""),
    "input": ({"exit": 3, "say": "error: no images. Fix: give some."}, "failed", "no images. Fix: give some."),
    "red": ({"exit": 1, "say": "a\x1b[31mred\x07"}, "failed", "a?[31mred?"),
    "silent": ({"exit": 4}, "failed", "step 1"),
}  # fmt: skip


def test_the_exit_code_is_the_state_and_the_last_line_the_reason(place: Place) -> None:
    lost = commands.add(place.runs, ["x"], label="lost", folder=place.folder / "gone")
    ids = {name: place.add(name, **orders).id for name, (orders, *_) in ENDS.items()}
    place.finish(place.worker(*"12345"))
    assert place.item(lost.id).state == "failed"
    assert re.search("cannot be started in .*gone", place.item(lost.id).error)
    for name, (orders, state, error) in ENDS.items():
        ended = place.item(ids[name])
        assert (ended.state, ended.error, ended.exit_code) == (state, error, orders["exit"])


def test_a_signal_is_told_from_an_error(place: Place) -> None:
    ends = {
        signal.SIGKILL: ("interrupted", "ran out of memory"),
        signal.SIGTERM: ("stopped", ""),
        signal.SIGSEGV: ("failed", f"signal {int(signal.SIGSEGV)}"),
    }
    ids = {number: place.add(number.name, until="never").id for number in ends}
    worker = place.worker(*"123")
    until(lambda: worker.tick() and all(trains(place, place.item(id)) for id in ids.values()))
    assert {item.device for item in commands.items(place.runs)} == set("123"), "one training each"
    for number, id in ids.items():
        os.kill(place.item(id).pid or 0, number)
    place.finish(worker)
    for number, (state, error) in ends.items():
        ended = place.item(ids[number])
        assert (ended.state, ended.exit_code) == (state, -number)
        assert error in ended.error


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
    pid = place.item(first.id).pid
    worker = place.worker()
    for _ in range(3):
        assert worker.tick()
    assert place.states() == {"a": "running", "b": "waiting"}
    assert place.item(first.id).pid == pid and not gone(pid)
    place.let("a").touch()
    place.finish(worker)
    assert place.states() == {"b": "finished", "a": "finished"}


UNSEEN: dict[str, tuple[dict[str, Any], str, int | None, str]] = {
    "done": ({}, "finished", 0, ""),
    "nan": ({"state": "failed", "exit": 5, "say": "nan"}, "failed", 5, "nan"),
    "lost": (
        {"state": "training", "exit": 1},
        "interrupted",
        None,
        "the trainer ended while no worker was running, without a final status",
    ),
}


def test_an_end_that_nobody_saw_is_told_by_its_own_run(place: Place) -> None:
    names = [*UNSEEN, "elsewhere"]
    ids = {
        name: place.add(name, until=str(place.let(name)), **UNSEEN.get(name, ({},))[0]).id
        for name in names
    }
    worker = place.worker(*"1234")
    until(lambda: worker.tick() and all(trains(place, place.item(id)) for id in ids.values()))
    os.kill(place.item(ids["elsewhere"]).pid or 0, signal.SIGKILL)
    for name in UNSEEN:
        place.let(name).touch()
    for child in worker.children.values():
        child.process.wait()
    # A run that went on in another process does not speak for the item.
    write_status(
        place.runs / "elsewhere", state="finished", exit_code=0, message="by another process"
    )
    assert set(place.states().values()) == {"running"}, "as the dead worker left it"
    queue_worker.settle(place.runs)
    for name, (_, state, code, error) in UNSEEN.items():
        ended = place.item(ids[name])
        assert (ended.state, ended.exit_code, ended.error) == (state, code, error)
    assert place.item(ids["elsewhere"]).state == "interrupted"


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


def test_a_worker_killed_before_it_wrote_the_process_down_starts_nothing_twice(
    place: Place,
) -> None:
    item = place.add("a", until=str(place.let("a")))
    worker = place.worker()
    until(lambda: worker.tick() and trains(place, item))
    began = place.item(item.id)
    place.become(began, pid=None, pid_started_s=None, run=None)
    successor = place.worker()
    assert successor.tick() and trains(place, item)
    assert place.item(item.id).pid == began.pid
    place.let("a").touch()
    until(lambda: worker.children[item.id].process.poll() is not None)
    place.finish(successor)
    assert place.item(item.id).state == "finished"


# ---- one worker


def test_there_is_one_worker_and_it_ends_by_itself(place: Place) -> None:
    place.add("a", until=str(place.let("a")))
    queue_worker.ensure_worker(place.runs, program=WORKER_PROGRAM)
    pid = queue_worker.worker_pid(place.runs)
    assert pid is not None
    assert os.getsid(pid) == pid
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
    queue_worker.ensure_worker(
        place.runs, program=("no such program",), clock=lambda: began_s + 5.0
    )
    with pytest.raises(MachineError, match="no such program|No such file"):
        queue_worker.ensure_worker(
            place.runs, program=("no such program",), clock=lambda: began_s + 11.0
        )
    queue_worker.ensure_worker(place.runs, program=WORKER_PROGRAM, clock=lambda: began_s + 11.0)
    until(lambda: place.states() == {"a": "finished"})
    assert queue_worker.worker_fault(place.runs) == ""
    until(lambda: queue_worker.worker_pid(place.runs) is None)


def test_a_damaged_note_of_the_worker_is_replaced_and_a_full_disk_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("a")
    (place.runs / ".queue" / ".worker.json").write_bytes(b'{"pid": -5}')
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


def test_a_training_started_by_hand_takes_a_device(place: Place) -> None:
    by_hand = place.runs / "by-hand"  # its process is this one
    by_hand.mkdir(parents=True)
    write_status(by_hand, state="training", exit_code=None, message="")
    for name in "ab":
        place.add(name)
    assert place.worker().tick() and set(place.states().values()) == {"waiting"}
    worker = place.worker("0", "1")
    assert queue_worker.outside(place.runs, ()) == ("by-hand",)
    until(lambda: worker.tick() and place.item("0001-a").has_ended)
    assert place.given("a")["device"] == "1", "CUDA's first GPU is where one trains by itself"
    write_status(by_hand, state="finished", exit_code=0, message="")
    place.finish(worker)


@pytest.mark.parametrize(
    ("uuids", "environment", "expected"),
    [
        (["GPU-a"], {"CUDA_VISIBLE_DEVICES": "3"}, ("",)),
        (["", ""], {}, ("0", "1")),
        (["GPU-c", "GPU-a"], {"CUDA_VISIBLE_DEVICES": " 2,GPU-a,nonsense"}, ("2", "GPU-a")),
        ([], {}, ("",)),
    ],
)
def test_one_slot_a_usable_card(
    uuids: list[str], environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    one = machine()
    gpus = [replace(one.gpus[0], index=index, uuid=uuid) for index, uuid in enumerate(uuids)]
    assert queue_worker.slots(replace(one, gpus=tuple(gpus)), environment) == expected
