"""Home as the page shows it: what trains now or is about to, what needs attention, every run with its newest picture.

Inputs: the runs folder, the language of the reader. Outputs: what cards.html shows; the buttons name the run and what
is asked, and routes.py checks both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError, TrainingStopped
from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.machine import Hardware
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Item
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.run_record import read

from .. import command_lines, runs
from ..live import Beginning, LiveTraining, beginning, running, waiting
from ..lora_files import day_of, result_of
from ..markup import inline, inline_sentence
from ..media import run_url
from ..queue.times import dataset_of
from ..run.starting import shown_photos
from ..run_mend import mend_of
from ..run_state import FINISHING, look
from ..runs import Followed, RunEntry, newest_pictures, page_url
from ..server.asset_files import EXAMPLE_IMAGES, example_url
from ..server.translation import Words
from ..workplace import Workplace

LIBRARY = "/library"
MAX_CARDS = 60
_NOW_SAMPLES = 3
_ATTENTION = frozenset({"failed", "interrupted"})
_ENDED = {
    "interrupted": "It ended without a word; it can be resumed.",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A run; `url` leads to its page, `shots` are its newest pictures, before the first one its images."""

    name: str
    url: str
    shots: Shots


@dataclass(frozen=True, kw_only=True)
class Now(Card):
    """A run that trains or is about to: how far it is in words and as a fraction, how long it takes, what it does.

    `item` is that of one without a run yet, which is stopped by it.
    """

    fraction: float
    far: str
    left: str
    said: str
    item: str = ""


@dataclass(frozen=True, kw_only=True)
class Shots:
    """Addresses of pictures, and what they are."""

    urls: tuple[str, ...]
    alt: str


@dataclass(frozen=True, kw_only=True)
class Ended(Card):
    """A run that does not train: how it ended and why."""

    state: str
    said: str
    why: Html | None
    cure: Html | None
    """What to do about it."""
    mended: tuple[str, str] | None
    """A button that trains again with the cure: its label and where it leads."""
    step: str
    steps: str
    fraction: float
    resumes: bool
    again: str
    """Trains again with changes."""
    lora: Result | None
    """What it made so far, None without a file."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The LoRA to take of a run: its page and its file, its base and its day, how good it is."""

    page: str
    file: str
    base: str
    written: str
    good: str


def stamp(work: Workplace, entries: Sequence[RunEntry]) -> str:
    """Return a text that changes when the cards of these runs do."""
    seen = tuple(runs.stamp(work.runs / run.name, run.status) for run in entries)
    begins = beginning(work, entries)
    waits = (item.id for item in _waiting(work, begins))
    return f"{hash((*seen, *begins, *waits)):x}"


def has_queued(work: Workplace) -> bool:
    """Whether the queue trains something, or something waits in it.

    Asked before the runs are looked for: a training that ends between the two is a run by then.
    """
    return waiting(work) > 0


def goes(entries: Sequence[RunEntry], *, has_queued: bool) -> bool:
    """Whether something trains or waits, so that the cards change by themselves."""
    return has_queued or any(run.status.state == "running" for run in entries)


def shown(
    work: Workplace, followed: Followed, _: Words, entries: Sequence[RunEntry]
) -> Mapping[str, Any]:
    """Return what cards.html shows, the newest first: runs that train, need attention, can go on, have finished."""
    trains = running(work, followed, entries)
    begins = beginning(work, entries)
    taken = {*trains, *(each.run for each in begins)}
    named = {run.name: run for run in entries}
    ended = [run for run in entries if run.name not in taken]
    listed = sorted(ended, key=lambda run: run.status.state not in _ATTENTION)[:MAX_CARDS]
    groups = {
        "attention": [run for run in listed if run.status.state in _ATTENTION],
        "stopped": [run for run in listed if run.status.state == "stopped"],
        "finished": [run for run in listed if run.status.state == "finished"],
    }
    return {
        "training": [
            *(_now(work, named[name], seen, _) for name, seen in trains.items() if name in named),
            *(_about_to(work, each, _) for each in begins),
        ],
        "waiting": [_waits(work, item, _) for item in _waiting(work, begins)],
        **{name: [_ended(work, run, _) for run in group] for name, group in groups.items()},
        "left_out": len(ended) - len(listed),
        "examples": [example_url(name) for name in EXAMPLE_IMAGES],
    }


def machine_line(work: Workplace, machine: Hardware, _: Words) -> str:
    """Return what this machine trains on, in a line."""
    try:
        disk = _("{#} of disk free", bytes_text(machine.disk_free_bytes(work.runs)))
    except (OSError, LoraTrainError):  # the folder was taken away while the page is open
        disk = _("the runs folder cannot be read")
    return _("This machine: {text} \u00b7 {text}", _device(machine, _), disk)


def _device(machine: Hardware, _: Words) -> str:
    if not machine.gpus:
        count = machine.cpu_threads
        threads = _("1 thread") if count == 1 else _("{#} threads", count)
        memory = bytes_text(machine.ram_total_bytes)
        return _(
            "no GPU that can train; {}, {text}, {#} of memory", machine.cpu_name, threads, memory
        )
    gpus = (
        _("{}, {#} of {#} free", gpu.name, bytes_text(gpu.free_bytes), bytes_text(gpu.total_bytes))
        for gpu in machine.gpus
    )
    return "; ".join(gpus)


def _now(work: Workplace, run: RunEntry, seen: LiveTraining, _: Words) -> Now:
    return Now(
        name=run.name,
        url=page_url(run.name),
        shots=_shots(work, run.name, _),
        fraction=seen.fraction,
        far=f"{seen.percent} %",
        left=_left(seen, _),
        said=_.message(seen.said),
    )


def _left(seen: LiveTraining, _: Words) -> str:
    if seen.left == FINISHING:
        return _("finishing")
    if seen.left:
        return _("{text} left", _.message(seen.left))
    return _("time left: known after the first steps")


def _about_to(work: Workplace, begins: Beginning, _: Words) -> Now:
    return Now(
        name=begins.name,
        url=begins.url,
        shots=_learned(work, dataset_of(begins.item), _),
        fraction=0.0,
        far=_("starting"),
        left="",
        said=_.message(begins.said) if begins.is_download else "",
        item=begins.item.id,
    )


def _waiting(work: Workplace, begins: Sequence[Beginning]) -> list[Item]:
    """Return what waits in the queue, the next one first, without what is about to train."""
    try:
        items = commands.in_order(commands.items(work.runs))
    except LoraTrainError:  # the page Queue says so
        return []
    begun = {each.item.id for each in begins}
    return [item for item in items if item.id not in begun]


def _waits(work: Workplace, item: Item, _: Words) -> Card:
    return Card(
        name=item.run or item.label or item.id,
        url="/queue",
        shots=_learned(work, dataset_of(item), _),
    )


def _learned(work: Workplace, dataset: Path | None, _: Words) -> Shots:
    """Return the first images that a training learns."""
    shown = shown_photos(work, dataset)[:_NOW_SAMPLES]
    return Shots(urls=tuple(photo.src for photo in shown), alt=_("one of its images"))


def _ended(work: Workplace, run: RunEntry, _: Words) -> Ended:
    status = run.status
    has_failed = status.state == "failed" and bool(status.message)
    what, _fix, cure = status.message.partition(" Fix: ") if has_failed else ("", "", "")
    return Ended(
        name=run.name,
        url=page_url(run.name),
        shots=_shots(work, run.name, _),
        state=status.state,
        said=_ENDED[status.state],
        why=inline_sentence(what, _) if what else None,
        cure=inline(cure.rstrip(". "), _) if cure else None,
        mended=_mended(work, run, _) if cure else None,
        step=f"{status.step:,}",
        steps=f"{status.steps:,}" if status.steps else "",
        fraction=status.step / status.steps if status.steps else 0.0,
        again=_again(run.name),
        resumes=status.state != "finished" and status.exit_code != TrainingStopped.exit_code,
        lora=_result(work, run, _),
    )


def _mended(work: Workplace, run: RunEntry, _: Words) -> tuple[str, str] | None:
    folder = work.runs / run.name
    try:
        record = read(folder)
    except (LoraTrainError, OSError):  # the run's own page says so
        return None
    mend = mend_of(look(folder, run.status, now_s=time.time()), record)
    return None if mend is None else (mend.said(_), _again(run.name, mended="1"))


def _again(run: str, **more: str) -> str:
    return "/train?" + urlencode({"again": run, **more})


def _result(work: Workplace, run: RunEntry, _: Words) -> Result | None:
    found = result_of(work.runs / run.name)
    if found is None:
        return None
    return Result(
        page=LIBRARY + "?" + urlencode({"file": found.file.ref}),
        file=run_url(run.name, found.file.path.name),
        base=title(found.header.base),
        written=_.message(day_of(found.file)),
        good=found.validation,
    )


def _shots(work: Workplace, run: str, _: Words) -> Shots:
    """Return the newest pictures of a run; until it has drawn one of its own, the images that it learns."""
    folder = work.runs / run
    found = newest_pictures(folder)
    if not found.files or found.of_base:
        learned = _learned(work, command_lines.recorded_dataset(folder), _)
        if learned.urls:
            return learned
    files = found.files[:_NOW_SAMPLES]
    return Shots(
        urls=tuple(run_url(run, *file.relative_to(folder).parts) for file in files),
        alt=_("drawn by the base, before {} learned", run)
        if found.of_base
        else _("newest sample of {}", run),
    )
