"""Figures that run along with training: a smoothed loss and the time left.

Inputs: one value per step. Outputs: numbers for the console, the trackers and the report. Pure
bookkeeping on the host; no clock is read here.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field


def measured(value: float | None) -> float:
    """Return a figure of an event; None stands for one that was not a finite number."""
    return math.nan if value is None else float(value)


@dataclass(kw_only=True)
class Smoothed:
    """Exponential moving average without start-up bias; passes over values that are not finite."""

    span_steps: float = 20.0
    _sum: float = 0.0
    _weight: float = 0.0

    def add(self, value: float) -> float:
        """Take one value and return the average so far; NaN before the first finite value."""
        if math.isfinite(value):
            keep = 1 - 2 / (self.span_steps + 1)
            self._sum = keep * self._sum + (1 - keep) * value
            self._weight = keep * self._weight + (1 - keep)
        return self.value

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


@dataclass(kw_only=True)
class Pace:
    """Time left: the median of recent steps, plus what saves, samples and validations have cost.

    Losses reach the host late and in bunches, so those side costs come from totals only.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _first_s: float = 0.0
    _last_s: float = 0.0
    _steps_after_first: int = 0
    _step_seconds: float = 0.0

    def add(self, seconds: float, *, at_s: float) -> None:
        """Take the duration of one step and the time at which it was reported."""
        if self.recent:
            self._steps_after_first += 1
            self._step_seconds += seconds
        else:
            self._first_s = at_s
        self._last_s = at_s
        self.recent.append(seconds)

    @property
    def step_s(self) -> float:
        """Median of the recent steps; NaN before the first."""
        return statistics.median(self.recent) if self.recent else math.nan

    @property
    def side_s(self) -> float:
        """Seconds spent outside of steps, per step so far."""
        if not self._steps_after_first:
            return 0.0
        outside_s = self._last_s - self._first_s - self._step_seconds
        return max(0.0, outside_s / self._steps_after_first)

    def remaining_s(self, steps: int) -> float:
        """Return the seconds that `steps` more steps will take; NaN before the first step."""
        return steps * (self.step_s + self.side_s)
