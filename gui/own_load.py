"""Beside how much of other programs a training is planned, so that all pages plan all trainings beside the same.

Trainings of the queue will have ended before another one starts, so they are taken off the load of the machine that a
plan has seen. What others do goes up and down: of two equal trainings planned one after the other, the second would
be said to take twice as long. So what one plan has seen counts for all plans for some minutes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lora_trainer.queue.commands import Item

_LOAD_OVER_S = 60.0  # hardware/machine.py: what programs did in the last minute
LOOK_COUNTS_S = 300.0
"""So long what a plan has seen of other programs counts for all plans."""


def own_load(items: Sequence[Item], *, now_s: float) -> float:
    """Return how many programs our own trainings count as in the load of the machine.

    Each wants the whole device, and makes another take once more as long; the load is an average of a minute, in which
    one that has just begun does not count in full.
    """
    since_s = [now_s - (item.started_s or now_s) for item in items if item.state == "running"]
    return math.fsum(min(1.0, max(0.0, seconds / _LOAD_OVER_S)) for seconds in since_s)


@dataclass(kw_only=True)
class Beside:
    """What plans saw other programs do, and when, by what the plans rest on.

    Only finished runs tell how many processors a training leaves to others: plans that rest on them see another load.
    """

    clock_s: Callable[[], float] = time.monotonic
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, rests_on: str, seen: float, *, own: float) -> float:
        """Return how many times as long a training takes beside other programs, at least 1.

        `seen` is what its plan says of this, and counts where no plan that rests on the same was made in the last
        minutes; `own` is how many of the programs that it has seen are our own trainings.
        """
        with self._lock:
            now_s = self.clock_s()
            at_s, load = self._seen.get(rests_on, (-math.inf, 1.0))
            if now_s - at_s > LOOK_COUNTS_S:
                load = max(1.0, seen - own)
                self._seen[rests_on] = (now_s, load)
            return load
