"""How long each waiting training takes and when it finishes, as `lora-train plan` predicts it.

Inputs: the items of the queue, the status of what runs, the rules. Outputs: a sentence for each waiting item. A plan
takes up to seconds, so this is asked apart from the lists, and plans are kept for a while.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lora_trainer.planning.run_time import middle
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Item
from lora_trainer.queue.rules import read_rules
from lora_trainer.reporting.plan_record import PlanRecord
from lora_trainer.reporting.status import read_status

from .. import command_lines
from ..clock import clock_text
from ..own_load import LOOK_COUNTS_S, own_load
from ..plan_view import from_now_s, load_of, span
from ..server.translation import Words
from ..workplace import Workplace

_KEPT = 64
# Options of a training that a plan does not take: those that change nothing of it, and short names of settings.
_NOT_PLANNED = frozenset({"--name", "--output"})
_SHORT = {"--steps": "train.steps", "--seed": "train.seed"}
_SWITCHES = frozenset({"--strict"})


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What a plan says of the time."""

    range_s: tuple[float, float] | None
    """The shortest and the longest time, beside the programs that ran then."""
    beside_others: bool = False
    """Whether these make it longer."""
    steps: int | None = None
    rank: object = None

    @classmethod
    def of(cls, plan: PlanRecord | None) -> _Planned:
        """Return what there is to say of a plan; None is one that was refused."""
        if plan is None:
            return cls(range_s=None)
        rank = plan.settings.get("adapter.rank")
        return cls(
            range_s=from_now_s(plan.time),
            beside_others=load_of(plan.time) > 1,
            steps=plan.time.steps,
            rank=rank.value if rank else None,
        )

    def facts(self, said: Words) -> list[str]:
        """Return in a few words each how much is trained.

        Without the images, which the line above counts: those held out are of these, and a second number would differ.
        """
        return [
            *([said("{#} steps", f"{self.steps:,}")] if self.steps else []),
            *([said("rank {#}", self.rank)] if self.rank else []),
        ]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What there is to say of a waiting training: how much it trains, how long it takes and when it finishes."""

    facts: str
    length: str


@dataclass(frozen=True, kw_only=True)
class AllWaiting:
    """What there is to say of each waiting training, by the id of its item; `note` is about all of them."""

    times: Mapping[str, Waits]
    note: str = ""


@dataclass(kw_only=True)
class Times:
    """The predicted seconds of the trainings that were asked for last, by their commands.

    Each that ends corrects the times of the others, so they are asked for anew. What other programs do is counted each
    time anew, as by the page Train, which may have looked at them since.
    """

    work: Workplace
    devices: Callable[[], int]
    """How many trainings this machine takes at the same time."""
    ask: Callable[[command_lines.Words], command_lines.Answer] = command_lines.ask
    clock_s: Callable[[], float] = time.time
    _known: OrderedDict[tuple[str, ...], tuple[float, command_lines.Answer]] = field(
        default_factory=OrderedDict
    )
    """When each was planned, and what was said."""
    _ended: frozenset[str] = frozenset()

    def of_waiting(self, said: Words) -> AllWaiting:
        """Return what there is to say of the time of each item that waits; raises MachineError."""
        items = commands.items(self.work.runs)
        ended = frozenset(item.id for item in items if item.has_ended)
        if ended != self._ended:
            self._ended = ended
            self._known.clear()
        rules = read_rules(self.work.runs)
        starts_at_once = not rules.paused and rules.when == "always"
        now_s = self.clock_s()
        free_s = self._free_s(items, now_s)
        own = own_load(items, now_s=now_s)
        found = {}
        slowed = False
        for item in commands.in_order(items):
            planned = self._planned(item, own=own)
            pair = None if planned is None else planned.range_s
            begins_s = heapq.heappop(free_s)
            ends_s = begins_s + (math.inf if pair is None else middle(pair))
            heapq.heappush(free_s, ends_s)
            if planned is None or pair is None:
                continue
            takes = span(pair, said)
            if starts_at_once and math.isfinite(ends_s):
                ends = said.message(clock_text(ends_s, now_s=now_s))
                length = said("takes {text}, finishes at about {}", takes, ends)
            else:
                length = said("takes {text}", takes)
            slowed = slowed or planned.beside_others
            found[item.id] = Waits(facts=", ".join(planned.facts(said)), length=length)
        note = (
            said("Other programs slow them down now, and the times count that.") if slowed else ""
        )
        return AllWaiting(times=found, note=note)

    def _free_s(self, items: Sequence[Item], now_s: float) -> list[float]:
        """Return when each device is free, as a heap; infinity where a training does not say."""
        running = [item for item in items if item.state == "running"]
        left = [
            read_status(self.work.runs / item.run).left_s if item.run else math.nan
            for item in running
        ]
        busy = [now_s + seconds if math.isfinite(seconds) else math.inf for seconds in left]
        free = [*busy, *([now_s] * (max(1, self.devices()) - len(busy)))]
        heapq.heapify(free)
        return free

    def _planned(self, item: Item, *, own: float) -> _Planned | None:
        """Return what the plan of a training says; None for one that goes on with a run."""
        words = planned_words(item)
        if words is None:
            return None
        at_s, answer = self._known.pop(words, (-math.inf, None))
        if answer is None or self.clock_s() - at_s > LOOK_COUNTS_S:
            at_s, answer = self.clock_s(), self.ask(words)
        self._known[words] = at_s, answer
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return _Planned.of(answer.beside(partial(self.work.beside.load, own=own)).plan)


def planned_words(item: Item) -> tuple[str, ...] | None:
    """Return the command that plans a training; None for one that goes on with a run."""
    planned = list[str]()
    for option, value in _options(item.argv):
        if option.startswith("--resume"):
            return None
        if option in _NOT_PLANNED or option in _SWITCHES:
            continue
        # The process that plans works in another folder.
        here = Path(item.folder) / value if value else None
        value = str(here) if here is not None and _is_there(here) else value
        if option in _SHORT:
            planned.append(f"--set={_SHORT[option]}={value}")
        else:
            planned.append(f"{option}={value}" if option and value else option or value)
    return ("plan", *planned, "--json")


def _is_there(path: Path) -> bool:
    """Whether a value is a path; that of a setting, such as prompts, may be too long for a name, or hold a null."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def dataset_of(item: Item) -> Path | None:
    """Return the folder of an item's images, None for an item without a command."""
    names = (value for option, value in _options(item.argv) if not option)
    name = next(names, "")
    return Path(item.folder) / name if name else None


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command with their values; an argument has no option, a switch no value."""
    rest = iter(argv)
    for word in rest:
        if not word.startswith("--"):
            yield "", word
        elif "=" in word or word in _SWITCHES:
            option, _, value = word.partition("=")
            yield option, value
        else:
            yield word, next(rest, "")
