"""Detects that a training's steps have become slower than they were, and that its memory keeps growing.

Input are the measurements of each step, output is a finding or None: pure arithmetic over the last steps,
no clock. A step is compared with steps of about as many latent positions. The first steps, steps after
samples, saves and validations, and single slow steps are ignored. Findings change nothing about the
training, so nothing here is part of the resume state.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

WARM_UP_STEPS = 3
BASELINE_STEPS = 15
WINDOW_STEPS, WINDOW_S = 10, 10.0
"""Slowness is reported once the median of so many steps is slow and they took at least so long together."""
SLOW, USUAL = 1.5, 1.2
_SAME_SIZE = math.log(1.25)

BLOCK_STEPS, WARM_UP_BLOCKS, LEAST_BLOCKS, MOST_BLOCKS = 25, 4, 20, 40
TREND_DEVIATIONS = 6.0
STILL_GROWING = 0.7
LEAST_GROWTH_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Duration of one step, `wait_s` of it spent waiting for the batch, and its latent positions."""

    seconds: float
    wait_s: float
    latents: int


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A finding: steps take `factor` times as long as usual; `now` and `usual` are medians a step."""

    factor: float
    now: Timed
    usual: Timed


@dataclass(kw_only=True)
class _Size:
    """The steps of one size: their count, the steps of the present block, and the median of each full block.

    The usual duration is the lower quartile of the block medians. The lowest median could be an accident;
    the middle one would be too high in a run that began beside another and now has the GPU to itself.
    """

    count: int = 0
    block: list[Timed] = field(default_factory=list)
    blocks: list[Timed] = field(default_factory=list)
    usual: Timed | None = None

    def take(self, step: Timed) -> None:
        self.block.append(step)
        if len(self.block) == BASELINE_STEPS:
            bisect.insort(self.blocks, _median(self.block), key=lambda usual: usual.seconds)
            self.usual = self.blocks[len(self.blocks) // 4]
            self.block.clear()


def _median(steps: Sequence[Timed]) -> Timed:
    return Timed(
        seconds=statistics.median(step.seconds for step in steps),
        wait_s=statistics.median(step.wait_s for step in steps),
        latents=steps[0].latents,
    )


@dataclass
class StepPace:
    """Judges the speed of steps by their size; slowness is reported again only after it had ended."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _window: deque[tuple[Timed, Timed]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _skip: int = 0
    _slow: bool = False

    @property
    def known(self) -> bool:
        """Whether there are steps to compare with."""
        return any(size.usual for size in self._sizes.values())

    def skip(self) -> None:
        """Ignore the next step, because an action ran between it and the step before."""
        self._skip = 1

    def forget(self) -> None:
        """Forget all measurements, because the training itself has changed (a remedy, say)."""
        self._sizes.clear()
        self._window.clear()
        self._slow = False

    def take(self, step: Timed) -> Slow | None:
        """Add a step; return a finding when the last WINDOW_STEPS have become slow."""
        # Sizes within a factor of 1.25 share a baseline, else every bucket would need its own.
        key = round(math.log(max(step.latents, 1)) / _SAME_SIZE)
        size = self._sizes.setdefault(key, _Size())
        size.count += 1
        # First steps of a size choose kernels and grow the allocator's pools: they are no measure of the others.
        if self._skip or size.count <= WARM_UP_STEPS:
            self._skip = 0
            return None
        usual = size.usual
        size.take(step)
        if usual is None:
            return None
        self._window.append((step, usual))
        if len(self._window) < WINDOW_STEPS:
            return None
        steps, usuals = zip(*self._window, strict=True)
        factor = statistics.median(
            step.seconds / usual.seconds for step, usual in zip(steps, usuals, strict=True)
        )
        if self._slow or factor < SLOW or sum(step.seconds for step in steps) < WINDOW_S:
            # Between USUAL and SLOW a finding goes on: steps around the limit are reported once, not every few steps.
            self._slow = self._slow and factor >= USUAL
            return None
        self._slow = True
        return Slow(factor=factor, now=_median(steps), usual=_median(usuals))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A finding: memory grows by so many bytes a step, by `so_far_bytes` since the warm-up blocks."""

    bytes_per_step: float
    so_far_bytes: int


@dataclass
class Creep:
    """Detects a memory that keeps growing from step to step; reports it once.

    Each block of steps counts by its lowest value, because batches, samples and saves add to the others for
    a while. A finding is a trend six standard deviations beyond chance (Mann 1945, Kendall 1975) whose
    median slope (Theil 1950, Sen 1968) has not levelled off; the slope of a cache that fills does.
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
        # A cache that fills grows fast, then slowly: the late slopes must still be near the whole one's.
        grown, late = blocks[-1] - blocks[0], blocks[len(blocks) // 2 :]
        slope = _slope(blocks)
        if grown < LEAST_GROWTH_BYTES or _trend(blocks) < TREND_DEVIATIONS:
            return None
        if min(_slope(late), _slope(blocks[-LEAST_BLOCKS // 2 :])) < STILL_GROWING * slope:
            return None
        self._found = True
        return Growth(bytes_per_step=slope / BLOCK_STEPS, so_far_bytes=grown)


def _trend(values: Sequence[int]) -> float:
    """Return the Mann-Kendall statistic, in its standard deviations for a sequence without a trend."""
    count = len(values)
    score = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    return (score - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _slope(values: Sequence[int]) -> float:
    """Return the Theil-Sen slope: the median of the slopes between all pairs of values."""
    places = combinations(range(len(values)), 2)
    return statistics.median((values[b] - values[a]) / (b - a) for a, b in places)
