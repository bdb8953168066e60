"""Sees when a training's steps have become slower than its own were, and when its memory grows.

Input is what each step measured, output a finding at most: pure arithmetic over the last steps, no clock.
A step is compared with steps of as many latents; the first ones, those after samples, saves and
validations, and single slow ones are no finding. It decides nothing about the training, so it is not
part of the resume state.
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
"""So many steps, together so long, are slow before it is said."""
SLOW, USUAL = 1.5, 1.2
_SAME_SIZE = math.log(1.25)

BLOCK_STEPS, WARM_UP_BLOCKS, LEAST_BLOCKS, MOST_BLOCKS = 25, 4, 20, 40
TREND_DEVIATIONS = 6.0
STILL_GROWING = 0.7
LEAST_GROWTH_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one step took, `wait_s` of it waiting for its batch, and for how many places of latents."""

    seconds: float
    wait_s: float
    latents: int


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Steps take `factor` times `usual_s`; seconds and waiting are medians, now and as they were."""

    factor: float
    seconds: float
    usual_s: float
    wait_s: float
    usual_wait_s: float


@dataclass(frozen=True, kw_only=True)
class _Usual:
    seconds: float
    wait_s: float


@dataclass(kw_only=True)
class _Size:
    """The steps of one size: how many, those of the present block, and the median of each block.

    Usual is the lower quartile of the blocks: a run that began beside others is known once it is alone,
    while the least of many would be an accident.
    """

    count: int = 0
    block: list[Timed] = field(default_factory=list)
    blocks: list[_Usual] = field(default_factory=list)
    usual: _Usual | None = None

    def take(self, step: Timed) -> None:
        self.block.append(step)
        if len(self.block) < BASELINE_STEPS:
            return
        median = _Usual(
            seconds=statistics.median(each.seconds for each in self.block),
            wait_s=statistics.median(each.wait_s for each in self.block),
        )
        self.block.clear()
        bisect.insort(self.blocks, median, key=lambda usual: usual.seconds)
        self.usual = self.blocks[len(self.blocks) // 4]


@dataclass
class Pace:
    """How fast steps are, by their size; slowness is found anew only after steps were as usual again."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _window: deque[tuple[Timed, _Usual]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _skip: int = 0
    _slow: bool = False

    @property
    def known(self) -> bool:
        """Whether there are steps to compare with."""
        return any(size.usual for size in self._sizes.values())

    def skip(self) -> None:
        """Leave the next step out: something was done before it that is no step."""
        self._skip = 1

    def forget(self) -> None:
        """Begin anew: the training itself has changed."""
        self._sizes.clear()
        self._window.clear()
        self._slow = False

    def take(self, step: Timed) -> Slow | None:
        """Take in a step; return a finding when the last ones have become slow."""
        key = round(math.log(max(step.latents, 1)) / _SAME_SIZE)
        size = self._sizes.setdefault(key, _Size())
        size.count += 1
        if self._skip or size.count <= WARM_UP_STEPS:
            self._skip = 0
            return None
        usual = size.usual
        size.take(step)
        if usual is None:
            return None
        self._window.append((step, usual))
        return self._judged()

    def _judged(self) -> Slow | None:
        if len(self._window) < WINDOW_STEPS:
            return None
        factor = statistics.median(step.seconds / usual.seconds for step, usual in self._window)
        if self._slow or factor < SLOW or sum(step.seconds for step, _ in self._window) < WINDOW_S:
            self._slow = self._slow and factor >= USUAL
            return None
        self._slow = True
        return Slow(
            factor=factor,
            seconds=statistics.median(step.seconds for step, _ in self._window),
            usual_s=statistics.median(usual.seconds for _, usual in self._window),
            wait_s=statistics.median(step.wait_s for step, _ in self._window),
            usual_wait_s=statistics.median(usual.wait_s for _, usual in self._window),
        )


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory that grows: so many bytes a step, `so_far_bytes` since the steps that warmed it up."""

    bytes_per_step: float
    so_far_bytes: int


@dataclass
class Creep:
    """Whether a memory grows from step to step without end; found once.

    The least of each block of steps counts, as batches, samples and saves come and go. A finding is a
    trend six standard deviations beyond chance (Mann 1945, Kendall 1975) whose median slope (Theil
    1950, Sen 1968) has not levelled off: what fills a cache does.
    """

    _block: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)
    _found: bool = False

    def take(self, used_bytes: int) -> Growth | None:
        """Take in what is used after a step; return a finding when it has grown all the time."""
        self._block.append(used_bytes)
        if len(self._block) < BLOCK_STEPS:
            return None
        self._least.append(min(self._block))
        self._block.clear()
        blocks = self._least[WARM_UP_BLOCKS:][-MOST_BLOCKS:]
        if self._found or len(blocks) < LEAST_BLOCKS:
            return None
        grown, late = blocks[-1] - blocks[0], blocks[len(blocks) // 2 :]
        slope = _slope(blocks)
        if grown < LEAST_GROWTH_BYTES or _trend(blocks) < TREND_DEVIATIONS:
            return None
        if min(_slope(late), _slope(blocks[-LEAST_BLOCKS // 2 :])) < STILL_GROWING * slope:
            return None
        self._found = True
        return Growth(bytes_per_step=slope / BLOCK_STEPS, so_far_bytes=grown)


def _trend(values: Sequence[int]) -> float:
    """Return the statistic of Mann and Kendall in standard deviations of a sequence without a trend."""
    count = len(values)
    score = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    return (score - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _slope(values: Sequence[int]) -> float:
    """Return the median of all slopes between two values."""
    places = combinations(range(len(values)), 2)
    return statistics.median((values[b] - values[a]) / (b - a) for a, b in places)
