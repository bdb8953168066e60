"""status.json: written when it must be, believed only while its process lives; control/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.events import Event, EventStream
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.status import (
    Status,
    StatusWriter,
    after,
    end_process,
    read_status,
)
from tests.fakes.run_folder import fake_run, relay


class Clock:
    """A clock that stands still until told."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def content(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "status.json").read_bytes())
    return value


def writer(folder: Path) -> tuple[EventStream, Clock]:
    clock, events = Clock(), EventStream()
    events.subscribe(StatusWriter(folder, events, clock=clock))
    return events, clock


def start(events: EventStream, *, resumed_from: int | None = None) -> None:
    events.emit("run_started", name="zorble", steps=9, resumed_from=resumed_from, every_steps={})


def step(events: EventStream, number: int, *, loss: float | None = 0.1) -> None:
    events.emit("step", step=number, loss=loss, seconds=0.5)


def test_states_of_a_whole_run(tmp_path: Path) -> None:
    seen: list[str] = []
    events, _ = writer(tmp_path)
    events.subscribe(lambda event: seen.append(content(tmp_path)["state"]))
    relay(fake_run(tmp_path / "other", steps=6), events)
    changes = [state for index, state in enumerate(seen) if index == 0 or seen[index - 1] != state]
    assert changes == ["starting", "caching", "starting", "training", "finished"]
    final = content(tmp_path)
    assert (final["step"], final["steps"], final["exit_code"]) == (6, 6, 0)


def test_what_the_file_holds(tmp_path: Path) -> None:
    events, _ = writer(tmp_path)
    start(events, resumed_from=4)
    assert content(tmp_path) == {
        "state": "starting",
        "pid": os.getpid(),
        "pid_started_s": psutil.Process().create_time(),
        "name": "zorble",
        "step": 4,
        "steps": 9,
        "phase": "",
        "done": 0,
        "total": 0,
        "message": "",
        "heartbeat_s": 1000.0,
        "left_s": None,
        "exit_code": None,
    }


def test_at_most_twice_a_second_but_the_newest_when_it_writes(tmp_path: Path) -> None:
    events, clock = writer(tmp_path)
    start(events)
    step(events, 1)
    for number in range(2, 5):
        clock.now_s += 0.1
        step(events, number)
    assert content(tmp_path)["step"] == 1
    clock.now_s += 0.2
    step(events, 5)
    assert content(tmp_path)["step"] == 5
    assert content(tmp_path)["message"] == "step 5 of 9, loss 0.1000"


def test_a_clock_set_back_does_not_silence_it(tmp_path: Path) -> None:
    events, clock = writer(tmp_path)
    start(events)
    step(events, 1)
    clock.now_s -= 3600
    step(events, 2)
    assert content(tmp_path)["step"] == 2


def test_state_changes_are_never_late(tmp_path: Path) -> None:
    events, _ = writer(tmp_path)
    start(events)
    step(events, 1)
    step(events, 2)
    events.emit("stopped", reason="asked\nto stop", exit_code=143, step=2)
    assert (content(tmp_path)["state"], content(tmp_path)["step"]) == ("stopped", 2)
    assert content(tmp_path)["message"] == "asked to stop"


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, "stopped"),
        (130, "stopped"),
        (143, "stopped"),
        (1, "failed"),
        (3, "failed"),
        (5, "failed"),
    ],
)
def test_exit_code_tells_a_stop_from_a_failure(tmp_path: Path, code: int, state: str) -> None:
    events, _ = writer(tmp_path)
    start(events)
    events.emit("stopped", reason="r", exit_code=code, step=0)
    assert (content(tmp_path)["state"], content(tmp_path)["exit_code"]) == (state, code)
    assert read_status(tmp_path).state == state


def test_the_end_is_final() -> None:
    ended = Status(state="finished", pid=1, pid_started_s=1.0, heartbeat_s=1.0, exit_code=0)
    late = Event(kind="phase", fields={"phase": "report", "message": "x"}, time_s=2.0)
    assert after(ended, late) == ended


def test_what_begins_is_named_at_once(tmp_path: Path) -> None:
    events, _ = writer(tmp_path)
    start(events)
    for done, message in ((0, "training"), (0, "sample images"), (1, "the second image")):
        events.emit("phase", phase="train", message=message, done=done, total=4)
    assert content(tmp_path)["message"] == "sample images", "the half second is not over"
    for message in ("an image", "loading the text encoders"):
        events.emit("phase", phase="train", message=message, done=2, total=4)
    assert content(tmp_path)["message"] == "loading the text encoders"


def test_the_steps_after_sample_images_are_no_sampling(tmp_path: Path) -> None:
    """A step on a processor can take minutes, in which the status said that images were made."""
    events, _ = writer(tmp_path)
    start(events)
    step(events, 1)
    events.emit("phase", phase="sample", message="sample images", done=0, total=1)
    assert content(tmp_path)["phase"] == "sample"
    events.emit("sample", step=1, images=[])
    assert [content(tmp_path)[key] for key in ("phase", "done", "total")] == ["train", 1, 9]


def test_beat_moves_the_heartbeat_between_events(tmp_path: Path) -> None:
    clock, events = Clock(), EventStream()
    status = StatusWriter(tmp_path, events, clock=clock)
    status.beat()
    clock.now_s += 60
    status.beat()
    assert content(tmp_path)["heartbeat_s"] == 1060.0


def test_loss_that_is_no_number(tmp_path: Path) -> None:
    events, _ = writer(tmp_path)
    start(events)
    step(events, 1, loss=None)
    assert content(tmp_path)["message"] == "step 1 of 9, loss not a number"


def test_a_disk_that_refuses_is_one_problem_and_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    events, clock = writer(folder)
    problems: list[Event] = []
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    start(events)
    for number in range(1, 4):
        clock.now_s += 1
        step(events, number)
    assert len(problems) == 1 and problems[0].fields["file"] == "status.json"
    folder.mkdir()
    clock.now_s += 1
    step(events, 4)
    assert content(folder)["step"] == 4


def test_running_while_the_process_lives(tmp_path: Path) -> None:
    events, _ = writer(tmp_path)
    start(events)
    step(events, 3)
    status = read_status(tmp_path)
    assert (status.state, status.stage, status.pid) == ("running", "training", os.getpid())
    assert (status.step, status.steps, status.name) == (3, 9, "zorble")


def alive(folder: Path, **changed: Any) -> None:
    own = psutil.Process()
    status = Status(
        state="training", pid=own.pid, pid_started_s=own.create_time(), heartbeat_s=1.0, step=7
    )
    (folder / "status.json").write_text(json.dumps(asdict(replace(status, **changed))))


def test_reused_pid_is_interrupted(tmp_path: Path) -> None:
    alive(tmp_path, pid_started_s=psutil.Process().create_time() - 60)
    status = read_status(tmp_path)
    assert (status.state, status.stage, status.step, status.pid) == (
        "interrupted",
        "training",
        7,
        None,
    )


def test_dead_and_unreaped_processes_are_interrupted(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive(tmp_path, pid=child.pid, pid_started_s=psutil.Process(child.pid).create_time())
    assert read_status(tmp_path).state == "running"
    child.kill()
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
        assert read_status(tmp_path).state == "interrupted"
    child.communicate()
    assert read_status(tmp_path).state == "interrupted"


def test_finished_stays_finished_after_its_process(tmp_path: Path) -> None:
    alive(tmp_path, state="finished", exit_code=0, pid_started_s=1.0)
    assert read_status(tmp_path).state == "finished"


@given(
    st.binary()
    | st.dictionaries(
        st.sampled_from(["state", "pid", "pid_started_s", "heartbeat_s", "x"]),
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    ).map(lambda value: json.dumps(value).encode())
)
def test_garbage_is_interrupted_and_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "status.json").write_bytes(data)
    assert read_status(folder).state == "interrupted"


def test_how_far_a_phase_is_and_that_nothing_but_the_end_follows_a_stop(tmp_path: Path) -> None:
    events, clock = writer(tmp_path)
    start(events)
    events.emit("phase", phase="cache", message="owl.png", done=3, total=9)
    clock.now_s += 1
    events.emit("phase", phase="cache", message="fox.png", done=4, total=9)
    assert [content(tmp_path)[key] for key in ("phase", "done", "total")] == ["cache", 4, 9]
    step(events, 1)
    assert [content(tmp_path)[key] for key in ("phase", "done", "total")] == ["train", 1, 9]
    events.emit("phase", phase="stop", message="saving", done=0, total=0)
    clock.now_s += 1
    step(events, 2)
    events.emit("phase", phase="sample", message="sample images", done=0, total=4)
    assert [content(tmp_path)[key] for key in ("phase", "message", "step")] == ["stop", "saving", 2]
    events.emit("phase", phase="quit", message="quitting", done=0, total=0)
    assert content(tmp_path)["phase"] == "quit"


def test_counts_that_are_no_numbers_make_a_file_unreadable(tmp_path: Path) -> None:
    alive(tmp_path)
    written = content(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps(written | {"steps": "<b>"}))
    assert "is no number" in read_status(tmp_path).message


def test_only_the_process_that_trains_is_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_s = psutil.Process(child.pid).create_time()
        alive(tmp_path, pid=child.pid, pid_started_s=started_s)
        status = read_status(tmp_path)
        assert not end_process(replace(status, pid_started_s=started_s - 60))
        assert child.poll() is None, "a number that is used again is another process"
        assert not end_process(replace(status, pid=None, pid_started_s=None))
        assert end_process(status)
        assert child.wait() != 0
    assert not end_process(status)
    assert read_status(tmp_path).state == "interrupted"


def test_requests_made_before_a_process_began_are_forgotten(tmp_path: Path) -> None:
    control = Control(tmp_path)
    control.forget_before(1.0)
    control.request("stop")
    control.request("save")
    os.utime(tmp_path / "control" / "stop", (100.0, 100.0))
    assert control.asked_at_s("stop") == 100.0
    assert control.asked_at_s("sample") is None
    control.forget_before(101.0)
    assert control.pending() == {"save"}


def test_missing_status_is_interrupted(tmp_path: Path) -> None:
    assert read_status(tmp_path / "nothing").state == "interrupted"


def test_control_requests_wait_until_done(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.pending() == set()
    control.request("save")
    control.request("stop")
    (tmp_path / "control" / "stop~").touch()
    assert control.pending() == {"save", "stop"}
    control.done("save")
    control.done("save")
    assert control.pending() == {"stop"}
