"""status.json: written when it must be, believed only while its process lives; control/."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.status import StatusWriter, read_status
from tests.fakes.made_events import made
from tests.fakes.run_folder import fake_run, relay


def content(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "status.json").read_bytes())
    return value


def writer(folder: Path) -> tuple[EventStream, Mock]:
    clock, events = Mock(return_value=1000.0), EventStream()
    events.subscribe(StatusWriter(folder, events, clock=clock))
    return events, clock


def start(events: EventStream, *, resumed_from: int | None = None) -> None:
    events.emit(
        made("run_started", name="zorble", steps=9, resumed_from=resumed_from, every_steps={})
    )


def step(events: EventStream, number: int, *, loss: float | None = 0.1, **took: float) -> None:
    events.emit(made("step", step=number, loss=loss, **{"seconds": 0.5, **took}))


def test_states_of_a_whole_run(tmp_path: Path) -> None:
    seen: list[str] = []
    events, _ = writer(tmp_path)
    events.subscribe(lambda event: seen.append(content(tmp_path)["state"]))
    relay(fake_run(tmp_path / "other", steps=6), events)
    changes = [state for index, state in enumerate(seen) if index == 0 or seen[index - 1] != state]
    assert changes == ["starting", "caching", "starting", "training", "finished"]
    final = content(tmp_path)
    assert (final["step"], final["steps"], final["exit_code"]) == (6, 6, 0)
    # A LoRA that exists ends with 0, whatever speaks against it.
    events, _ = writer(tmp_path)
    start(events)
    events.emit(made("finished", step=9, early="", doubt="the LoRA is worse than the base"))
    final = content(tmp_path)
    assert (final["state"], final["exit_code"]) == ("finished", 0)
    assert final["message"] == "finished, but the LoRA is worse than the base"
    # And before the first step of a resumed run.
    events, _ = writer(tmp_path)
    start(events, resumed_from=4)
    now = {"pid": os.getpid(), "pid_started_s": psutil.Process().create_time()}
    assert content(tmp_path) == now | {
        "state": "starting", "name": "zorble", "step": 4, "steps": 9, "phase": "", "done": 0, "total": 0,
        "message": "", "heartbeat_s": 1000.0, "left_s": None, "left_from": "", "steps_here": 0, "exit_code": None,
    }  # fmt: skip


def test_at_most_twice_a_second_but_the_newest_when_it_writes(tmp_path: Path) -> None:
    events, clock = writer(tmp_path)
    start(events)
    assert content(tmp_path)["step"] == 0
    step(events, 1)
    for number in range(2, 5):
        clock.return_value += 0.1
        step(events, number)
    assert content(tmp_path)["step"] == 1
    clock.return_value += 0.2
    step(events, 5)
    assert content(tmp_path)["step"] == 5
    assert content(tmp_path)["message"] == "step 5 of 9, loss 0.1000"
    clock.return_value -= 3600  # a clock set back does not silence it
    step(events, 6, loss=None)
    assert content(tmp_path)["step"] == 6
    assert content(tmp_path)["message"] == "step 6 of 9, loss not a number"
    step(events, 7)  # and a change of state is never late
    events.emit(made("stopped", reason="asked\nto stop", exit_code=143, step=7))
    end = content(tmp_path)
    assert (end["state"], end["step"], end["message"]) == ("stopped", 7, "asked to stop")


def test_exit_code_tells_a_stop_from_a_failure_and_the_end_is_final(tmp_path: Path) -> None:
    for code, state in ((130, "stopped"), (143, "stopped"), (5, "failed")):
        events, clock = writer(tmp_path)
        start(events)
        events.emit(made("stopped", reason="r", exit_code=code, step=0))
        clock.return_value += 9
        events.emit(made("phase", phase="report", message="x", done=0, total=0))
        end = content(tmp_path)
        assert (end["state"], end["exit_code"], end["phase"]) == (state, code, "")
        assert read_status(tmp_path).state == state


def test_what_begins_is_named_at_once_and_nothing_but_the_end_follows_a_stop(
    tmp_path: Path,
) -> None:
    events, clock = writer(tmp_path)
    start(events)

    def phase(name: str, message: str, *, done: int, total: int) -> None:
        events.emit(made("phase", phase=name, message=message, done=done, total=total))

    def now(*keys: str) -> list[Any]:
        return [content(tmp_path)[key] for key in keys]

    for done, message in ((0, "training"), (0, "sample images"), (1, "the second image")):
        phase("train", message, done=done, total=4)
    assert now("message") == ["sample images"], "the half second is not over"
    for message in ("an image", "loading the text encoders"):
        phase("train", message, done=2, total=4)
    assert now("message") == ["loading the text encoders"]
    phase("cache", "owl.png", done=3, total=9)
    clock.return_value += 1
    phase("cache", "fox.png", done=4, total=9)
    assert now("phase", "done", "total") == ["cache", 4, 9]
    step(events, 1)
    assert now("phase", "done", "total") == ["train", 1, 9]
    # A step on a processor can take minutes, in which the status said that images were made.
    phase("sample", "sample images", done=0, total=1)
    assert now("phase") == ["sample"]
    events.emit(made("sample", step=1, images=[]))
    assert now("phase", "done", "total") == ["train", 1, 9]
    phase("stop", "saving", done=0, total=0)
    clock.return_value += 1
    step(events, 2)
    phase("sample", "sample images", done=0, total=4)
    assert now("phase", "message", "step") == ["stop", "saving", 2]
    phase("quit", "quitting", done=0, total=0)
    assert now("phase") == ["quit"]


def test_a_disk_that_refuses_is_one_problem_and_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    events, clock = writer(folder)
    problems: list[Event] = []
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    start(events)
    for number in range(1, 4):
        clock.return_value += 1
        step(events, number)
    assert len(problems) == 1 and problems[0].fields["file"] == "status.json"
    folder.mkdir()
    clock.return_value += 1
    step(events, 4)
    assert content(folder)["step"] == 4


def alive(folder: Path, **changed: Any) -> None:
    own = psutil.Process()
    status = {"state": "training", "pid": own.pid, "pid_started_s": own.create_time()}
    status |= {"heartbeat_s": 1.0, "step": 7, "name": "zorble", **changed}
    (folder / "status.json").write_text(json.dumps(status))


def test_only_a_living_process_runs(tmp_path: Path) -> None:
    alive(tmp_path, pid_started_s=psutil.Process().create_time() - 60)  # its number is used again
    status = read_status(tmp_path)
    assert (status.state, status.stage, status.step) == ("interrupted", "training", 7)
    assert status.pid is None
    alive(tmp_path, state="finished", exit_code=0, pid_started_s=1.0)
    assert read_status(tmp_path).state == "finished"
    assert read_status(tmp_path / "nothing").state == "interrupted"
    alive(tmp_path, steps="<b>")
    message = read_status(tmp_path).message
    assert message == "status.json cannot be read: steps: Input should be a valid integer"


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


def test_a_process_that_was_killed_and_not_yet_waited_for_runs_no_more(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_s = psutil.Process(child.pid).create_time()
        alive(tmp_path, pid=child.pid, pid_started_s=started_s)
        status = read_status(tmp_path)
        assert (status.state, status.stage, status.pid) == ("running", "training", child.pid)
        assert (status.step, status.name) == (7, "zorble")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
        assert read_status(tmp_path).state == "interrupted"


def test_requests_wait_until_done_or_older_than_the_process(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.pending() == set()
    control.request("stop")
    control.request("save")
    (tmp_path / "control" / "stop~").touch()
    os.utime(tmp_path / "control" / "stop", (100.0, 100.0))
    assert control.pending() == {"save", "stop"}
    assert (control.asked_at_s("stop"), control.asked_at_s("sample")) == (100.0, None)
    control.forget_before(101.0)
    for waiting in ({"save"}, set(), set()):
        assert control.pending() == waiting
        control.done("save")


# ---- the time that is left


def timed(folder: Path, *, steps: int, **every_steps: int) -> tuple[EventStream, Mock]:
    events, clock = writer(folder)
    events.clock = clock
    events.emit(
        made("run_started", name="z", steps=steps, resumed_from=None, every_steps=every_steps)
    )
    assert math.isnan(read_status(folder).left_s)
    return events, clock


def test_time_left_is_the_median_plus_what_lies_between_steps(tmp_path: Path) -> None:
    events, clock = timed(tmp_path, steps=298)
    for number in range(1, 101):
        seconds = 1.0 if number != 95 else 61.0  # one hiccup must not count
        clock.return_value += seconds
        step(events, number, seconds=seconds)
        if number == 1:
            clock.return_value += 100.0
            events.emit(made("base_losses", step=1, seconds=100.0, losses=[]))
        if number % 10 == 0 and number < 100:
            clock.return_value += 5.0
    assert read_status(tmp_path).left_s == pytest.approx(198 + 90)


def test_late_losses_in_bunches_cost_nothing(tmp_path: Path) -> None:
    events, clock = timed(tmp_path, steps=100)
    for number in range(1, 41):
        clock.return_value = 1000.0 + 4.0 * math.ceil(number / 4)
        step(events, number, seconds=1.0)
    events.emit(made("phase", phase="sample", message="", done=0, total=1))
    assert 60.0 <= read_status(tmp_path).left_s < 60 * 1.03


def test_time_left_is_the_plans_until_the_first_steps_tell_and_says_so(tmp_path: Path) -> None:
    events, clock = writer(tmp_path)
    events.clock = clock
    planned = {"start": 20.0, "caching": 10.0, "steps": 300.0, "sample images": 30.0}
    source = "from 2 finished runs on this machine"

    def begin(resumed_from: int | None) -> None:
        events.emit(
            made(
                "run_started",
                name="z",
                steps=100,
                resumed_from=resumed_from,
                every_steps={},
                planned_s=planned,
                planned_from=source,
            )
        )

    def shown() -> tuple[float, str, int]:
        status = read_status(tmp_path)
        return pytest.approx(status.left_s), status.left_from, status.steps_here

    begin(None)
    assert shown() == (360.0, source, 0)
    clock.return_value += 25.0
    events.emit(made("phase", phase="train", message="", done=0, total=100))
    assert shown() == (335.0, source, 0)
    clock.return_value += 20.0  # a start that takes longer takes nothing from the steps
    events.emit(made("phase", phase="train", message="", done=0, total=100))
    assert shown() == (330.0, source, 0)
    clock.return_value += 600.0  # the plan was wrong, and nothing is measured yet
    events.emit(made("phase", phase="train", message="", done=0, total=100))
    assert math.isnan(read_status(tmp_path).left_s) and shown()[1:] == ("", 0)
    for number in range(1, 3):  # the first ones measure nothing
        clock.return_value += 50.0 if number == 1 else 2.0
        step(events, number, seconds=50.0 if number == 1 else 2.0)
    for number in range(3, 101):
        clock.return_value += 2.0
        step(events, number, seconds=2.0)
        if number == 20:
            assert shown() == (160.0, "from the first 20 steps", 20)
    assert shown()[1:] == ("from the last 50 steps", 100)
    events, clock = writer(tmp_path)
    events.clock = clock
    begin(50)  # a resume has its start, and half of the rest
    assert shown() == (195.0, source, 0)


def test_time_left_counts_the_rounds_that_are_due(tmp_path: Path) -> None:
    """At each step of a run in equal steps, time left is the truth: also before the first round is repeated."""
    events, clock = timed(tmp_path, steps=100, sample=40, validation=30)
    promised_end_s = []

    def between(number: int) -> None:
        for kind, every, seconds in (("validation", 30, 8.0), ("sample", 40, 25.0)):
            if number % every == 0 or number == 100:
                clock.return_value += seconds
                events.emit(made(kind, step=number, seconds=seconds))

    between(0)
    for number in range(1, 101):
        clock.return_value += 2.0
        step(events, number, seconds=2.0)
        events.emit(made("sample", step=number, seconds=999.0, asked=True))  # somebody's own prompt
        promised_end_s.append(clock.return_value + read_status(tmp_path).left_s)
        between(number)
    assert promised_end_s == pytest.approx([clock.return_value] * 100)
    assert read_status(tmp_path).left_s == 0.0
