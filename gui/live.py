"""What every page shows of the trainings that run, as a small JSON: `/live`, for shared/live.js.

Input: the runs folder. Output: name, percent, time left and state of each run that trains, what is about to, how
those ended that did not long ago, how many wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.nvml import card_states
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Item
from lora_trainer.queue.rules import read_rules
from lora_trainer.reporting.status import read_status

from . import drafts, runs
from .cockpit import MEMORY, Cockpit, cockpit_now
from .run_state import left_text, look, sentence
from .runs import Followed, RunEntry
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


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """A training that the queue has begun, or begins next, and that has said nothing of itself yet.

    `run` is the name of the run that goes on, empty for a new one; `said` is what happens now.
    """

    item: Item
    name: str
    run: str
    url: str
    said: str
    is_download: bool = False


def beginning(work: Workplace, entries: Sequence[RunEntry]) -> tuple[Beginning, ...]:
    """Return what is about to train; `entries` are the runs there are."""
    trains = _training(entries)
    try:
        items = commands.items(work.runs)
    except LoraTrainError:  # the page Queue says so
        return ()
    begun = [item for item in items if item.state == "running"]
    if begun:
        pids = {read_status(work.runs / name).pid for name in trains}
        # The process of an item may have its run before the worker has seen it.
        chosen = [item for item in begun if item.run is None and item.pid not in pids - {None}]
    else:
        # The worker takes the next one within seconds, unless something else trains or the rules forbid it.
        held = bool(trains) or bool(read_rules(work.runs).holds(now_s=time.time(), is_idle=False))
        chosen = [] if held else commands.in_order(items)[:1]
    found = (_beginning(work, item, entries) for item in chosen)
    return tuple(each for each in found if each.run not in trains)


def _training(entries: Sequence[RunEntry]) -> Set[str]:
    return {run.name for run in entries if run.status.state == "running"}


def _beginning(work: Workplace, item: Item, entries: Sequence[RunEntry]) -> Beginning:
    run = _goes_on(work, item, entries)
    draft = None if run else drafts.started_as(work, item.id)
    url = runs.page_url(run) if run else "/queue"
    if draft is not None:
        url = "/run?" + urlencode({"draft": draft.id})
    download = commands.download_of(work.runs, item)
    said = "Starting."
    if download is not None:
        here, whole = bytes_text(download.here_bytes), bytes_text(download.all_bytes)
        said = f"downloading the base model {download.source}: {here} of {whole}"
    return Beginning(
        item=item,
        name=run or item.label or item.id,
        run=run,
        url=url,
        said=said,
        is_download=download is not None,
    )


def _goes_on(work: Workplace, item: Item, entries: Sequence[RunEntry]) -> str:
    """Return the name of the run that an item of the queue goes on with, an empty text for a new one."""
    for run in entries:
        target = str((work.runs / run.name).resolve())
        if {target, f"--resume-from={target}"} & set(item.argv):
            return run.name
    return ""


def running(
    work: Workplace, followed: Followed, entries: Sequence[RunEntry]
) -> Mapping[str, LiveTraining]:
    """Return those of the runs that train, by name."""
    return {
        run.name: _live_training(work, run, followed)
        for run in entries
        if run.status.state == "running"
    }


def _live_training(work: Workplace, run: RunEntry, followed: Followed) -> LiveTraining:
    folder, status = work.runs / run.name, run.status
    fraction = min(1.0, status.step / status.steps) if status.steps else 0.0
    seen = look(folder, status, now_s=time.time())
    try:
        history = followed.read(folder).history
    except (LoraTrainError, OSError):  # its page says so
        return LiveTraining(fraction=fraction, left="", said="training")
    left = left_text(status)
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
    entries = runs.find_runs(work.runs)
    trains = running(work, followed, entries)
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
        "starting": [
            {"name": each.name, "url": each.url, "said": _("starting")}
            for each in beginning(work, entries)
        ],
        "ended": {
            run.name: _ENDED[run.status.state]
            for run in entries
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
