"""A training beside other programs: what they take is seen, and threads then wait asleep; results stay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.hardware.machine import usable_processors
from lora_trainer.training import cores
from tests.fakes.runs import events, toy

needs_libgomp = pytest.mark.skipif(
    cores.openmp() != "libgomp", reason="another OpenMP computes here"
)


@pytest.mark.parametrize(("all_s", "own_s", "taken"), [(9, 1, 2), (3, 1, 1), (0, 4, 0)])
def test_no_more_processors_are_taken_than_there_are_and_none_less_than_none(
    all_s: float, own_s: float, taken: float
) -> None:
    before = cores.CpuTimes(at_s=5, all_s=50, own_s=20)
    after = cores.CpuTimes(at_s=7, all_s=50 + all_s, own_s=20 + own_s)
    assert cores.cores_taken(before, after, processors=2) == taken


def waits() -> int:
    """How often threads of this process have gone to sleep by themselves."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return found


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@needs_libgomp
@pytest.mark.skipif(len(usable_processors()) == 1, reason="there is nothing to share")
def test_threads_sleep_at_once_and_spin_again_after_a_while_of_calm() -> None:
    """Others take a core for three looks and pause, then half of one breaks the calm once.

    At the fourth look this thread computes while the others' wait asleep; the results are the same bits.
    """
    told: list[tuple[int, Event]] = []
    stream, watched, numbers = EventStream(), threading.Event(), usable_processors()
    others = len(numbers) - 1.0
    taken = [*[others] * 3, *[0.0] * 5, others - 0.7, *[0.0] * 6]
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    asleep, computed = threading.Event(), threading.Event()
    earlier = set(thread_names())  # what other tests have left, such as a tracker that hangs
    looks = 0
    stream.subscribe(lambda event: told.append((looks, event)))
    teams: list[bool] = []
    stream.subscribe(lambda event: teams.append("lora-train-idle-team" in thread_names()))

    def measure(_: Sequence[int]) -> cores.CpuTimes:
        """The process takes one core all the time."""
        nonlocal looks
        looks += 1
        if looks == 4:
            asleep.set()
            assert computed.wait(60)
        if looks > len(taken) + 1:
            watched.set()
        return cores.CpuTimes(at_s=looks, all_s=looks + sum(taken[: looks - 1]), own_s=looks)

    def results() -> Tensor:
        for _ in range(300):
            y = x * x + x.sum()
        return y

    with threads_of(2):
        spinning = results()
        with cores.shared_cores(stream, measure=measure, interval_s=0.001):
            assert asleep.wait(60)
            before = waits()
            assert torch.equal(results(), spinning)
            assert waits() - before >= 300
            computed.set()
            assert watched.wait(60)
    assert [(look, event.kind, event.fields["waiting"]) for look, event in told] == [
        (2, "cores", "asleep"),
        (len(taken) + 1, "cores", "spinning"),
    ]
    assert told[0][1].fields["taken"] == others
    assert teams == [True, False]
    assert {name for name in thread_names() if name.startswith("lora-train-")} <= earlier


@needs_libgomp
def test_where_nothing_can_be_measured_threads_go_on_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "usable_processors", lambda: (_ for _ in ()).throw(OSError("/proc")))
    with threads_of(2), cores.shared_cores(EventStream(), interval_s=0.001):
        pass


def test_one_thread_waits_for_nobody() -> None:
    with threads_of(1), cores.shared_cores(EventStream()):
        assert "lora-train-cores" not in thread_names()


@needs_libgomp
@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor has one thread")
def test_a_training_beside_busy_programs_sleeps(tmp_path: Path) -> None:
    place, processors = toy(tmp_path).with_base(), os.cpu_count() or 1
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processors)]
    try:
        assert place.train(hardware__threads=processors, steps=15) == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    told = events(place.run, "cores")
    assert told[0]["waiting"] == "asleep" and told[0]["taken"] > 0.5
