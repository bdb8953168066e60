"""Lets a training share the processor: its threads wait asleep while other programs want cores.

OpenMP's threads meet at the end of every operation, and in libgomp the early ones spin for milliseconds.
Without other programs this is fastest. With fewer free cores than threads it is ruinous: a spinning thread
occupies the core that the last thread needs, and two trainings beside each other take ten times as long or
more. Sleeping instead costs a third of the speed alone, and next to nothing beside other programs.

libgomp's threads sleep at once while it manages more threads than there are processors, counted over all
teams of a process. So a few idle teams switch from spinning to sleeping without changing the number of
threads of any operation, which keeps results bit-equal. Intel's and LLVM's OpenMP (Windows, macOS) give
way by themselves.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

from lora_trainer.common.event_kinds import Cores
from lora_trainer.common.events import EventStream
from lora_trainer.hardware.machine import usable_processors

INTERVAL_S = 0.5
# Cores that threads lack: above the first they sleep; after a while below the second they spin again.
CONTENDED_CORES, CALM_CORES = 0.5, 0.25
CALM_INTERVALS = 6
_GRAIN = 2**15  # elements for which torch takes one more thread
_IDLE_TIMES = ("idle", "iowait", "steal", "guest", "guest_nice")  # guest is part of user already


class CpuTimes(NamedTuple):
    """Seconds of processor time since the start, of all programs on usable processors and of this process.

    `waited_s` is how long threads of this process were ready and had no processor, None where the system does not tell.
    """

    at_s: float
    all_s: float
    own_s: float
    waited_s: float | None = None


def cpu_times(processors: Sequence[int]) -> CpuTimes:
    """Measure processor times now; raises OSError or psutil.Error if the system does not tell."""
    process_times = psutil.Process().cpu_times()
    each = psutil.cpu_times(percpu=True)
    busy = sum(
        sum(times) - sum(getattr(times, name, 0.0) for name in _IDLE_TIMES)
        for number, times in enumerate(each)
        if number in processors
    )
    own_s = process_times.user + process_times.system
    return CpuTimes(at_s=time.monotonic(), all_s=busy, own_s=own_s, waited_s=_waited_s())


def cores_taken(before: CpuTimes, after: CpuTimes, *, processors: int) -> float:
    """Return how many of the usable processors other programs used between two measurements."""
    passed_s, own_s = after.at_s - before.at_s, after.own_s - before.own_s
    if passed_s <= 0:
        return 0.0
    # All programs' times and our own are read at different moments, so the difference may leave the range.
    return min(processors, max(0.0, after.all_s - before.all_s - own_s) / passed_s)


def _waited_s() -> float | None:
    """Return how long the threads that this process has now were ready and had no processor; None if unknown.

    Linux tells it: Documentation/scheduler/sched-stats.rst, nanoseconds in the second field.
    """
    waited_ns, is_known = 0, False
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread has ended meanwhile
            waited_ns += int(file.read_text(encoding="ascii").split()[1])
            is_known = True
    return waited_ns / 1e9 if is_known else None


def cores_used(before: CpuTimes, after: CpuTimes) -> float:
    """Return how many processors this process used between two measurements."""
    passed_s = after.at_s - before.at_s
    return (after.own_s - before.own_s) / passed_s if passed_s > 0 else 0.0


def cores_waited_for(before: CpuTimes, after: CpuTimes) -> float | None:
    """Return how many more this process was ready to use between two measurements; None if unknown."""
    passed_s = after.at_s - before.at_s
    if before.waited_s is None or after.waited_s is None or passed_s <= 0:
        return None
    # A thread that has ended takes its time with it.
    return max(0.0, after.waited_s - before.waited_s) / passed_s


@contextmanager
def idle_teams(*, threads: int, processors: int) -> Iterator[None]:
    """Keep idle OpenMP teams while the block runs: libgomp counts more threads than processors, and all wait asleep.

    libgomp ends a team with its leading thread.
    """
    over, ready = threading.Event(), threading.Semaphore(0)

    def lead() -> None:
        # A thread's first operation of this size creates its own OpenMP team.
        torch.ones(_GRAIN * threads, dtype=torch.uint8).add_(1)
        ready.release()
        over.wait()

    # The training's own team has `threads` threads, each idle team adds `threads` - 1 beside its leader;
    # together they must exceed the processors by one.
    team_count = max(1, math.ceil((processors + 1 - threads) / (threads - 1)))
    leaders = [
        threading.Thread(target=lead, name="lora-train-idle-team", daemon=True)
        for _ in range(team_count)
    ]
    for leader in leaders:
        leader.start()
        ready.acquire()
    try:
        yield
    finally:
        over.set()
        for leader in leaders:
            leader.join()


@contextmanager
def shared_cores(
    events: EventStream,
    *,
    measure: Callable[[Sequence[int]], CpuTimes] = cpu_times,
    interval_s: float = INTERVAL_S,
) -> Iterator[None]:
    """While the block runs, a thread measures other programs' load and switches how ours wait.

    Each switch is an event `cores`. Does nothing if one thread computes, or OpenMP is not libgomp.
    """
    threads, done = torch.get_num_threads(), threading.Event()
    if threads == 1 or openmp() != "libgomp":
        yield
        return

    def watch() -> None:
        calm_intervals, waiting, teams = 0, "spinning", ExitStack()
        # Without measurements threads spin, libgomp's default.
        with suppress(OSError, psutil.Error), teams:
            numbers = usable_processors()
            before = measure(numbers)
            while not done.wait(interval_s):
                now = measure(numbers)
                taken = cores_taken(before, now, processors=len(numbers))
                missing, before = threads - (len(numbers) - taken), now
                calm_intervals = calm_intervals + 1 if missing <= CALM_CORES else 0
                if waiting == "spinning" and missing > CONTENDED_CORES:
                    teams.enter_context(idle_teams(threads=threads, processors=len(numbers)))
                    waiting = "asleep"
                elif waiting == "asleep" and calm_intervals >= CALM_INTERVALS:
                    teams.close()
                    waiting = "spinning"
                else:
                    continue
                events.emit(Cores(taken=round(taken, 2), threads=threads, waiting=waiting))

    watcher = threading.Thread(target=watch, name="lora-train-cores", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def openmp() -> Literal["libgomp", "other"]:
    """Return the OpenMP library loaded in this process."""
    try:
        names = {Path(part.path).name for part in psutil.Process().memory_maps()}
    except (AttributeError, NotImplementedError, psutil.Error):  # macOS has no memory_maps
        return "other"
    if any(name.startswith(("libiomp5", "libomp")) for name in names):
        return "other"
    return "libgomp" if any(name.startswith("libgomp") for name in names) else "other"
