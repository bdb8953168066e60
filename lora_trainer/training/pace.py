"""Notices that steps have become slower or that memory keeps growing, finds why steps are slower, and says so once.

First pure arithmetic over the measurements of the last steps, no clock. A step is compared with steps of about
as many latent positions. The first steps, steps after samples, saves and validations, and single slow steps are
ignored. Findings change nothing about the training, so nothing here is part of the resume state.

Then the causes: other programs on the GPU, lower clocks, full memory, busy cores. The machine is measured
twice, while steps are fast and after they have become slow; the difference names the cause. Nothing raises: a
value that cannot be read is not a cause.
"""

from __future__ import annotations

import bisect
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import psutil

from lora_trainer.common.event_kinds import (
    BaseLosses,
    Change,
    Cores,
    Event,
    Learned,
    OutOfMemory,
    Preview,
    Samples,
    Step,
    Validation,
)
from lora_trainer.common.events import EventStream
from lora_trainer.config.running import RunConfig
from lora_trainer.hardware.machine import GIB, SPILL_MARGIN_BYTES, free_ram_bytes, usable_processors
from lora_trainer.hardware.nvml import CardState, Gpu, card_state
from lora_trainer.training.cores import cores_taken, cpu_times

WARM_UP_STEPS = 3
BASELINE_STEPS = 15
# Slowness is reported once the median of so many steps is slow and they took at least so long together.
WINDOW_STEPS, WINDOW_S = 10, 10.0
SLOW, USUAL = 1.5, 1.2

BLOCK_STEPS, WARM_UP_BLOCKS, LEAST_BLOCKS, MOST_BLOCKS = 25, 4, 20, 40
TREND_DEVIATIONS = 6.0
STILL_GROWING = 0.7
LEAST_GROWTH_BYTES = 64 * 2**20


class Timed(NamedTuple):
    """Duration of one step, and how much of it was spent waiting for the batch."""

    seconds: float
    wait_s: float


class Slow(NamedTuple):
    """A finding: steps take `factor` times as long as usual; `now` and `usual` are medians a step."""

    factor: float
    now: Timed
    usual: Timed


@dataclass
class _Size:
    """The steps of one size: their count, the steps of the present block, and the sorted medians of full blocks."""

    count: int = 0
    block: list[Timed] = field(default_factory=list)
    blocks: list[Timed] = field(default_factory=list)


def _median(steps: Sequence[Timed]) -> Timed:
    return Timed(*map(statistics.median, zip(*steps, strict=True)))


@dataclass
class StepPace:
    """Judges the speed of steps by their size; slowness is reported again only after it had ended."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _window: deque[tuple[Timed, Timed]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    skip: bool = False
    """Whether the next step is ignored, because an action ran between it and the step before."""
    _slow: bool = False

    @property
    def known(self) -> bool:
        """Whether there are steps to compare with."""
        return any(size.blocks for size in self._sizes.values())

    def take(self, step: Timed, latents: int) -> Slow | None:
        """Add a step of so many latent positions; return a finding when the last WINDOW_STEPS have become slow."""
        # Sizes within a factor of 1.25 share a baseline, else every bucket would need its own.
        key = round(math.log(max(latents, 1)) / math.log(1.25))
        size = self._sizes.setdefault(key, _Size())
        size.count += 1
        # First steps of a size choose kernels and grow the allocator's pools: they do not measure the other steps.
        if self.skip or size.count <= WARM_UP_STEPS:
            self.skip = False
            return None
        # The usual time is the lower quartile of the medians of blocks. The lowest median could be an accident; the
        # middle one would be too high in a run that began beside another and now has the GPU to itself.
        if size.blocks:
            self._window.append((step, size.blocks[len(size.blocks) // 4]))
        size.block.append(step)
        if len(size.block) == BASELINE_STEPS:
            bisect.insort(size.blocks, _median(size.block))
            size.block.clear()
        if len(self._window) < WINDOW_STEPS:
            return None
        steps, usuals = zip(*self._window, strict=True)
        factor = statistics.median(step.seconds / usual.seconds for step, usual in self._window)
        if self._slow or factor < SLOW or sum(step.seconds for step in steps) < WINDOW_S:
            # Between USUAL and SLOW a finding goes on: steps around the limit are reported once, not every few steps.
            self._slow = self._slow and factor >= USUAL
            return None
        self._slow = True
        return Slow(factor, now=_median(steps), usual=_median(usuals))


class Growth(NamedTuple):
    """A finding: memory grows by so many bytes a step, by `so_far_bytes` since the warm-up blocks."""

    bytes_per_step: float
    so_far_bytes: int


@dataclass
class Creep:
    """Detects a memory that keeps growing from step to step; reports it once.

    Each block of steps counts by its lowest value, because batches, samples and saves add to the others for
    a while. A finding is a trend six standard deviations beyond chance (Mann 1945, Kendall 1975) whose
    slope has not levelled off; the slope of a cache that fills does.
    """

    _block: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)
    _found: bool = False

    def take(self, used_bytes: int) -> Growth | None:
        """Add the memory in use after a step; return a finding when it has kept growing."""
        self._block.append(used_bytes)
        if len(self._block) < BLOCK_STEPS:
            return None
        self._least.append(min(self._block))
        self._block.clear()
        blocks = self._least[WARM_UP_BLOCKS:][-MOST_BLOCKS:]
        if self._found or len(blocks) < LEAST_BLOCKS:
            return None
        # Mann and Kendall's score, and its standard deviation for a sequence without a trend.
        count, grown = len(blocks), blocks[-1] - blocks[0]
        score = sum((b > a) - (b < a) for a, b in combinations(blocks, 2))
        deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        # A cache that fills grows fast, then slowly: the late slopes must still be near the whole one's.
        slope, *late = (
            statistics.linear_regression(range(len(part)), part).slope
            for part in (blocks, blocks[count // 2 :], blocks[-LEAST_BLOCKS // 2 :])
        )
        self._found = (
            grown >= LEAST_GROWTH_BYTES
            and score - 1 >= TREND_DEVIATIONS * deviation
            and min(late) >= STILL_GROWING * slope
        )
        return Growth(slope / BLOCK_STEPS, so_far_bytes=grown) if self._found else None


# What lowers a clock, by NVML's bits (thermal slowdown, brake slowdown, each of software and hardware), and the fix.
_CLOCKS = (
    (0x20 | 0x40, "heat", "give it more air, or lower its power limit (nvidia-smi -pl WATTS)"),
    (0x08 | 0x80, "the power supply", "plug the machine in, and check the GPU's power cables"),
    (
        0,
        "its power limit or settings",
        "plug a laptop in, or raise the limit (nvidia-smi -pl WATTS)",
    ),
)
_LOWER_CLOCK = 0.85
_BUSY_PERCENT = 10
_SHARED_CORES = 0.5
_SWAPPED_BYTES_PER_S = 2**20
_WATCHED_S = 1.0
_WAIT = "close them or wait for them; the result stays the same"


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """State of the machine at one moment: the GPU of the training, cores other programs use, swap writes.

    `gives_way`: the training's threads wait asleep for each other, because others want the cores (cores.py).
    """

    card: CardState | None = None
    processors: int = 1
    cores_taken: float = 0.0
    swapped_bytes_per_s: float = 0.0
    gives_way: bool = False


class Cause(NamedTuple):
    """A cause of slow steps as `observation`, and its `fix`; each `name` is reported once."""

    name: str
    observation: str
    fix: str


def causes(
    slow: Slow, before: MachineState, now: MachineState, *, gpu: Gpu | None, config: RunConfig
) -> Iterator[Cause]:
    """Yield the causes that explain slower steps of a training on `gpu`, the likeliest first, then "unknown"."""
    # The data are the cause only of the time beyond the usual, at least half of which must be waiting.
    waits_s = slow.now.wait_s - slow.usual.wait_s
    longer_s = slow.now.seconds - slow.usual.seconds
    if waits_s > longer_s / 2:
        share, steps = 100 * slow.now.wait_s / slow.now.seconds, config.data.prefetch_steps
        yield Cause(
            "data",
            f"{share:.0f} % of a step is waiting for prepared batches",
            f"raise data.prefetch_steps (now {steps}), or put data.cache_dir on a faster disk",
        )
    if gpu is not None and before.card is not None and now.card is not None:
        yield from _card_causes(before.card, now.card, spills=gpu.spills)
    if now.swapped_bytes_per_s > _SWAPPED_BYTES_PER_S:
        blocks, mib_per_s = config.memory.streamed_blocks, now.swapped_bytes_per_s / 2**20
        lower = f"a lower memory.streamed_blocks (now {blocks})"
        change = lower if blocks else "memory.base_precision=int8"
        yield Cause(
            "swap",
            f"the machine is out of memory and swaps {mib_per_s:.0f} MiB/s",
            f"close other programs, or continue with --resume and {change}",
        )
    # Beside a GPU one thread launches kernels; the others only prepare batches, which is measured as waiting.
    threads = 1 if gpu is not None else config.hardware.threads
    lacks_cores = now.processors - now.cores_taken < threads
    more = now.cores_taken - before.cores_taken > _SHARED_CORES
    taken = f"other programs use {now.cores_taken:.1f} of {now.processors} processors"
    taken += f", {before.cores_taken:.1f} before"
    if more and lacks_cores:
        yield Cause("processor", taken, _WAIT)
    elif now.gives_way and not before.gives_way:
        yield Cause("processor", "the training's threads gave way to other programs", _WAIT)
    elif now.cores_taken > _SHARED_CORES and lacks_cores and now.cores_taken >= before.cores_taken:
        # Hardly more than at the first look, whose second may have been a busy one; still the likeliest of all causes.
        yield Cause("processor", taken, _WAIT)
    beside = ", the disk and `nvidia-smi`" if gpu is not None else " and the disk"
    look_at = f"look at other programs{beside}; the result stays the same"
    # The log has said that other programs take processors: "no cause" beside it would read as a contradiction.
    known = "no cause was found but the other programs, which took processors before, too"
    yield Cause("unknown", known if now.gives_way else "no cause was found", look_at)


def _card_causes(before: CardState, now: CardState, *, spills: bool) -> Iterator[Cause]:
    used, total = now.used_bytes / GIB, now.total_bytes / GIB
    if spills and now.total_bytes - now.used_bytes < SPILL_MARGIN_BYTES:
        more_bytes = max(0, now.used_bytes - before.used_bytes)
        # Leave out what other programs have taken since the run began, and half a GiB to spare.
        limit = max(1.0, total - more_bytes / GIB - 0.5)
        yield Cause(
            "spill",
            f"the GPU is full, {used:.1f} of {total:.1f} GiB, and its driver moves memory to the host",
            "close other programs on the GPU, or continue with --resume --set "
            f"hardware.vram_limit_gib={limit:.1f}",
        )
    old_mhz, new_mhz = before.clock_mhz, now.clock_mhz
    if old_mhz is not None and new_mhz is not None and new_mhz < _LOWER_CLOCK * old_mhz:
        heat = "" if now.celsius is None else f" at {now.celsius} degrees Celsius"
        rows = (row for bits, *row in _CLOCKS if now.held_back & bits or not bits)
        name, fix = next(rows)
        clock = f"the GPU's clock went from {old_mhz} to {new_mhz} MHz{heat}"
        yield Cause(name, f"{clock}, because of {name}", fix)
    # In a container the driver gives the host's process numbers, so our own may not be among them: the
    # busiest one before was this training.
    busiest = max(before.busy_percent, key=before.busy_percent.__getitem__, default=None)
    seen_before = before.users | before.busy_percent.keys() | {os.getpid()}
    busier = {
        pid
        for pid, percent in now.busy_percent.items()
        if before.busy_percent and percent - before.busy_percent.get(pid, 0) > _BUSY_PERCENT
    } - {busiest, os.getpid()}
    new = sorted((now.users | now.busy_percent.keys()) - seen_before | busier)
    if new:
        names = [f"process {pid}" for pid in new[:3]]
        for index, pid in enumerate(new[:3]):
            with suppress(psutil.Error):
                names[index] = f"{psutil.Process(pid).name()} ({names[index]})"
        programs = f"other programs use the GPU: {', '.join(names)}"
        yield Cause("others", f"{programs}; {used:.1f} of {total:.1f} GiB are in use", _WAIT)


# ---- what is said

# Host memory grows while the first epoch reads cache entries; growth counts after it, or after this step.
_FILLED_STEPS = 5000


@dataclass(kw_only=True)
class Notices:
    """Listener of a run's events, active while the block runs; warnings are `problem` events.

    Looking at the machine takes a second, so a thread beside the training does it. `gpu` is that of the training.
    """

    config: RunConfig
    gpu: Gpu | None
    events: EventStream
    _pace: StepPace = field(default_factory=StepPace)
    _vram: Creep = field(default_factory=Creep)
    _host: Creep = field(default_factory=Creep)
    _usual: Future[MachineState] | None = None
    _gives_way: bool = False
    _told: set[str] = field(default_factory=set)
    _beside: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lora-train-notices")
    )

    def __enter__(self) -> Notices:
        # The thread starts here and not in a step: where memory is used up, a thread that starts may die before
        # Python hears of it, and Python then waits for it for ever.
        self._beside.submit(int)
        self.events.subscribe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.events.unsubscribe(self)
        self._beside.shutdown()

    def __call__(self, event: Event) -> None:
        match event:
            case Samples() | Preview() | Validation() | BaseLosses() | Learned():
                self._pace.skip = True
            case Change() | OutOfMemory():
                self._pace = StepPace()  # the training itself has changed
            case Cores():
                self._gives_way = event.waiting == "asleep"
            case Step():
                self._after_step(event)

    def _after_step(self, done: Step) -> None:
        step = done.step
        timed = Timed(done.seconds, wait_s=done.data_wait_s)
        slow = self._pace.take(timed, done.latents)
        if self._pace.known and self._usual is None:
            self._usual = self._beside.submit(self._look)
        if slow is not None:
            self._beside.submit(self._explain, slow, step)
        filled = done.epoch >= 1 or step > _FILLED_STEPS
        if filled and (growth := self._host.take(done.host_own_bytes)):
            self._tell_growth("host memory", growth, step, free_bytes=free_ram_bytes())
        gpu = self.gpu
        if gpu is not None and (growth := self._vram.take(done.vram_now_bytes)):
            free_bytes = gpu.total_bytes - done.vram_used_bytes
            self._tell_growth("the GPU's memory", growth, step, free_bytes=free_bytes)

    def _look(self) -> MachineState:
        """Measure the machine for one second; blocks meanwhile."""
        card = card_state(self.gpu) if self.gpu is not None else None
        numbers, taken, swapped = usable_processors(), 0.0, 0.0
        with suppress(OSError, RuntimeError, psutil.Error):
            before, swapped_before = cpu_times(numbers), psutil.swap_memory().sout
            time.sleep(_WATCHED_S)
            after = cpu_times(numbers)
            taken = cores_taken(before, after, processors=len(numbers))
            swapped = (psutil.swap_memory().sout - swapped_before) / (after.at_s - before.at_s)
        return MachineState(
            card=card,
            processors=len(numbers),
            cores_taken=taken,
            swapped_bytes_per_s=swapped,
            gives_way=self._gives_way,
        )

    def _explain(self, slow: Slow, step: int) -> None:
        assert self._usual is not None, "it is measured before the first step can be slow"
        before, now = self._usual.result(), self._look()
        cause = next(causes(slow, before, now, gpu=self.gpu, config=self.config))
        if cause.name in self._told:
            return
        self._told.add(cause.name)
        self.events.problem(
            f"steps take {slow.factor:.1f} times as long as before, {slow.now.seconds:.2g} s instead of "
            f"{slow.usual.seconds:.2g}, up to step {step}: {cause.observation}",
            fix=cause.fix,
        )

    def _tell_growth(self, memory: str, growth: Growth, step: int, *, free_bytes: int) -> None:
        per_step = growth.bytes_per_step
        full_in = max(0, int(free_bytes / per_step))
        too_soon = full_in < self.config.train.steps - step
        self.events.problem(
            f"{memory} grows by {100 * per_step / 2**20:.0f} MiB every 100 steps, "
            f"{growth.so_far_bytes / 2**20:.0f} MiB by step {step}: the {free_bytes / GIB:.1f} GiB that are "
            f"free are used up in {full_in} steps, {'before' if too_soon else 'after'} the end of the run",
            fix="stop and continue with --resume, which starts with fresh memory, and please report it"
            if too_soon
            else "no action needed for this run; please report it",
            severity="warning" if too_soon else "note",
        )
