"""How much of the machine's load is trainings of the queue, which will have ended before another one starts.

Inputs: the items of the queue, the time. Output: how many programs they count as, to be taken off the load beside which
a plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lora_trainer.queue.commands import Item

_LOAD_OVER_S = 60.0  # hardware/machine.py: what programs did in the last minute


def own_load(items: Sequence[Item], *, now_s: float) -> float:
    """Return how many programs our own trainings count as in the load of the machine.

    Each wants the whole device, and makes another take once more as long; the load is an average of a minute, in which
    one that has just begun does not count in full.
    """
    since_s = [now_s - (item.started_s or now_s) for item in items if item.state == "running"]
    return math.fsum(min(1.0, max(0.0, seconds / _LOAD_OVER_S)) for seconds in since_s)
