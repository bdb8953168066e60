"""What every page shows of the trainings that run, as a small JSON: `/live`, for shared/live.js.

Input: the runs folder. Output: name, percent, time left and state of each run that trains, how those
ended that did not long ago, how many wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.hardware.nvml import card_states
from lora_trainer.queue import commands

from . import runs
from .cockpit import MEMORY, Cockpit, cockpit_now
from .run_state import left_text, look, sentence
from .runs import Followed
from .server.translation import Words
from .workplace import Workplace

_ENDED_WITHIN_S = 3600.0
_ENDED = {
    "finished": "the training is finished",
    "stopped": "the training is stopped, its state saved",
    "failed": "the training has failed",
    "interrupted": "the training ended without a word",
}


@dataclass(frozen=True, kw_only=True)
class LiveTraining:
    """A run that trains; `fraction` of 1 is done, `left` is its time left in words, or empty."""

    fraction: float
    left: str
    said: str
    cockpit: Cockpit | None = None

    @property
    def percent(self) -> int:
        """How much is done, rounded; 100 is for what has ended."""
        return min(99, round(100 * self.fraction))


def running(work: Workplace, followed: Followed) -> Mapping[str, LiveTraining]:
    """Return the runs that train, by name."""
    return {
        run.name: _training(work, run, followed)
        for run in runs.find_runs(work.runs)
        if run.status.state == "running"
    }


def _training(work: Workplace, run: runs.RunEntry, followed: Followed) -> LiveTraining:
    folder, status = work.runs / run.name, run.status
    fraction = min(1.0, status.step / status.steps) if status.steps else 0.0
    seen = look(folder, status, now_s=time.time())
    try:
        history = followed.read(folder).history
    except (LoraTrainError, OSError):  # its page says so
        return LiveTraining(fraction=fraction, left="", said="training")
    left = left_text(status.left_s)
    machine = cockpit_now(work, status, history, card_states())
    return LiveTraining(fraction=fraction, left=left, said=sentence(seen, history), cockpit=machine)


def _drawn(machine: Cockpit, _: Words) -> dict[str, Any]:
    names = [name for name, _text in machine.figures]
    return {
        "figures": [[_(name), _.message(value)] for name, value in machine.figures],
        "memory": machine.memory_share,
        "memory_at": names.index(MEMORY) if MEMORY in names else -1,
        "warning": _(machine.warning) if machine.warning else "",
    }


def live(work: Workplace, followed: Followed, _: Words) -> dict[str, Any]:
    """Return what the bar of each page shows."""
    trains = running(work, followed)
    return {
        "training": [
            {
                "name": name,
                "url": runs.page_url(name),
                "percent": seen.percent,
                "left": _.message(seen.left),
                "cockpit": None if seen.cockpit is None else _drawn(seen.cockpit, _),
            }
            for name, seen in trains.items()
        ],
        "ended": {
            run.name: _ENDED[run.status.state]
            for run in runs.find_runs(work.runs)
            if run.name not in trains and time.time() - run.status.heartbeat_s < _ENDED_WITHIN_S
        },
        "waiting": waiting(work),
    }


def waiting(work: Workplace) -> int:
    """Return how many items of the queue have not ended."""
    try:
        return sum(not item.has_ended for item in commands.items(work.runs))
    except LoraTrainError:  # the page Queue says so
        return 0
