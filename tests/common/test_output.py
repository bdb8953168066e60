"""Streams whose terminal, pipe or disk goes away, and listeners that raise or hang: nothing of it ends a run."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common import output
from lora_trainer.common.event_kinds import Event, Step
from lora_trainer.common.events import Aside, EventStream, ListenerLost
from lora_trainer.common.output import Outlet, lost_output, outlast, output_aside, say_last
from tests.fakes.made_events import made

PROGRAM = """
import sys
from lora_trainer.common.output import outlast, output_aside, lost_output
outlast("stdout"), outlast("stderr")
{}
sys.exit(7)
"""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def program(lines: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, "-c", PROGRAM.format(lines)]
    return subprocess.run(words, check=False, timeout=60, **streams)


@pytest.fixture
def pipe() -> Iterator[tuple[int, Outlet]]:
    """A pipe's end to read from, and an outlet into the other one."""
    reading, writing = os.pipe()
    raw = io.FileIO(writing, "wb")
    yield reading, Outlet(raw)
    raw.close()


def test_what_cannot_be_written_is_lost_and_the_exit_code_is_the_programs_own() -> None:
    """Python's own flush at exit would print "Exception ignored" and exit with 120."""
    say = "print('a'); print('b', file=sys.stderr); sys.stdout.flush()"
    aside = f"with output_aside():\n    {say}"
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, os.fdopen(writing, "wb") as broken:  # noqa: PTH123 - a device
        for stream in (full, broken):
            for lines in (say, aside):
                done = program(lines, stdout=stream, stderr=stream)
                assert done.returncode == 7, "not 1 and not 120"
                done = program(lines, stdout=stream, stderr=subprocess.PIPE)
                assert (done.returncode, done.stderr) == (7, b"b\n")


def test_closed_streams_get_no_file_of_the_program() -> None:
    closed = f'exec {sys.executable} -c "$0" <&- >&- 2>&-'
    lines = "import os\nassert os.open('/dev/zero', 0) > 2\nprint('a')"
    done = subprocess.run(["sh", "-c", closed, PROGRAM.format(lines)], check=False, timeout=60)
    assert done.returncode == 7


def test_a_terminal_that_was_closed_is_lost_and_said_to_be() -> None:
    leader, follower = pty.openpty()
    with io.FileIO(follower, "wb") as raw:
        outlet = Outlet(raw)
        assert outlet.isatty()
        outlet.write(b"seen")
        os.close(leader)
        assert outlet.write(b"not seen") == 8
        assert outlet.error is not None and outlet.error.errno == errno.EIO
        outlet.isatty()  # raises nothing


def test_all_bytes_arrive_in_order(pipe: tuple[int, Outlet]) -> None:
    reading, outlet = pipe
    content = bytes(range(256)) * 1000  # more than a pipe holds
    received = bytearray()

    def read() -> None:
        while len(received) < len(content):
            received.extend(os.read(reading, 1000))

    reader = threading.Thread(target=read)
    reader.start()
    assert outlet.write(content) == len(content)
    reader.join()
    assert received == content and outlet.error is None


def test_a_reader_that_takes_nothing_delays_nothing_and_is_left(
    pipe: tuple[int, Outlet], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, outlet = pipe
    stream = io.TextIOWrapper(outlet, write_through=True)  # type: ignore[type-var]  # as in `outlast`
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(output, "PATIENCE_S", 0.0)
    monkeypatch.setattr(output, "_MOST_WAITING_BYTES", 300_000)
    with output_aside():
        for _ in range(5_000):  # a pipe holds 64 KiB
            say("x" * 100)
    assert isinstance(lost_output(), TimeoutError)
    say("and nothing waits afterwards")
    os.close(reading)
    monkeypatch.undo()  # before the pipe closes


def test_lines_that_nobody_read_are_counted_once_the_reader_is_back(
    pipe: tuple[int, Outlet], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, outlet = pipe
    monkeypatch.setattr(output, "_MOST_WAITING_BYTES", 150_000)
    stream = io.TextIOWrapper(outlet, write_through=True)  # type: ignore[type-var]  # as in `outlast`
    monkeypatch.setattr(sys, "stdout", stream)
    received = bytearray()
    with output_aside():
        for _ in range(30):
            say("x" * 9_999)
        while len(received) < 150_000:
            received += os.read(reading, 65_536)
        say("again")
        while not received.endswith(b"again\n"):
            received += os.read(reading, 65_536)
    *_, note, last = bytes(received).decode().splitlines()
    assert last == "again" and note.startswith("[") and "lines are left out" in note


def test_a_stream_of_somebody_elses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", theirs)
    outlast("stdout")
    assert sys.stdout is theirs
    say("ä")
    with output_aside():
        say_last("to stderr\n")


# ---- listeners


def test_no_listener_ends_a_run() -> None:
    events, seen = EventStream(), list[Event]()

    def broken(_: Event) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken\npipe")

    events.subscribe(broken)
    events.subscribe(seen.append)
    events.emit(made("step", step=1))
    events.emit(made("step", step=2))
    step, problem, second = sorted(seen, key=lambda event: event.fields.get("step") or 9)[:3]
    assert [step.fields.get("step"), problem.fields.get("step")] == [
        1,
        2,
    ] and second.kind == "problem"
    assert "broken gets no more events of the run: BrokenPipeError" in second.fields["what"]
    assert second.fields["code"] == "TRN-05" and len(seen) == 3
    assert broken not in events.listeners


def test_a_record_is_tried_again_and_its_failure_told_once() -> None:
    events, seen, taken = EventStream(), list[Event](), list[str]()

    def record(event: Event) -> None:
        if event.kind == "cores":
            raise TypeError("odd")
        taken.append(event.kind)

    events.subscribe(record, is_record=True)
    events.subscribe(seen.append)
    for kind in ("cores", "step", "cores", "finished"):
        events.emit(made(kind))
    assert taken == ["problem", "step", "finished"]
    assert [event.kind for event in seen].count("problem") == 1


def test_memory_that_ran_out_drops_nobody_and_an_interrupt_passes() -> None:
    events, errors = EventStream(), [MemoryError(), KeyboardInterrupt()]

    def short(_: Event) -> None:
        raise errors.pop(0)

    events.subscribe(short)
    events.emit(made("step", step=1))
    assert short in events.listeners
    with pytest.raises(KeyboardInterrupt):
        events.emit(made("step", step=2))


def test_a_listener_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_trainer.common.events.MOST_WAITING", 3)
    events, problems, hang, began = EventStream(), list[str](), threading.Event(), threading.Event()

    def hanging(_: Event) -> None:
        began.set()
        hang.wait(60)

    aside = Aside(hanging, events=events, title="the wall display")
    events.subscribe(aside)
    events.subscribe(lambda event: problems.append(str(event.fields.get("what"))))
    events.emit(made("step", step=1))
    assert began.wait(60)
    for _ in range(20):
        events.emit(made("step", step=2))
    assert aside not in events.listeners
    told = [what for what in problems if what != "None"]
    assert told == [
        "the wall display gets no more events of the run: it has not taken the last 3 events"
    ]
    aside.close(within_s=0)
    assert "did not end within 0 s" in problems[-1]
    hang.set()


def test_a_listener_aside_takes_all_in_order_before_the_end() -> None:
    events, seen = EventStream(), list[Any]()
    aside = Aside(lambda event: seen.append(event.fields["step"]), events=events, title="t")
    events.subscribe(aside)
    for step in range(100):
        events.emit(made("step", step=step))
    aside.close(within_s=60)
    assert seen == list(range(100))


def test_a_lost_listener_says_why() -> None:
    events, seen = EventStream(), list[Event]()

    class Lost:
        title = "the console"

        def __call__(self, _: Event) -> None:
            raise ListenerLost("it cannot be written: gone")

    events.subscribe(Lost())
    events.subscribe(seen.append)
    events.emit(made("step", step=1))
    (problem,) = [event for event in seen if event.kind == "problem"]
    assert (
        problem.fields["what"]
        == "the console gets no more events of the run: it cannot be written: gone"
    )


def test_a_real_terminal_closed_in_a_run_stops_it_with_its_state(tmp_path: Path) -> None:
    """With SIGHUP, as the system sends it, and a terminal that gives EIO from then on."""
    from lora_trainer.common.events import read_events
    from lora_trainer.reporting.status import read_status

    folder = Path(__file__).parents[2] / "datasets" / "example"
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - another program
        # A test run under nohup ignores SIGHUP, and so would the training.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        words = ["lora_trainer", str(folder), "--steps", "500", "--output", str(tmp_path)]
        for setting in (
            "data.resolution=64", "train.batch_size=1", "sampling.every_steps=0", "train.seed=1",
            "train.validate_every_steps=0", "logging.trackers=[]", f"data.cache_dir={tmp_path}/cache",
        ):  # fmt: skip
            words += ["--set", setting]
        os.execv(
            sys.executable, [sys.executable, "-m", *words, "--base", "embedded", "--name", "r"]
        )
    run = tmp_path / "r"
    while not any(isinstance(event, Step) for event in read_events(run / "events.jsonl")):
        os.read(terminal, 65_536)  # the live line is drawn four times a second
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    status = read_status(run)
    assert (status.state, status.exit_code) == ("stopped", 143)
    assert [path.name for path in (run / "states").glob("step-*")] == [f"step-{status.step:08d}"]
