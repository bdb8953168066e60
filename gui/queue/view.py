"""The queue as the page shows it: what trains, what waits in its order, what has ended and why.

Inputs: the items of the runs folder's queue, the status of their runs. Outputs: what list.html shows; a button names
the item and what is asked, and `press` checks both. Nothing is remembered here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.wording import bytes_text, one_line, without_secrets
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.dataset.slider_file import is_slider_file
from lora_trainer.queue import commands, rules, worker
from lora_trainer.queue.commands import Item
from lora_trainer.queue.rules import read_rules
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import sequence
from lora_trainer.reporting.run_record import read
from lora_trainer.reporting.status import RunStatus, read_status

from .. import run_actions, slider_words
from ..clock import clock_text
from ..command_lines import command_line
from ..datasets import check
from ..library.preview import small_url
from ..library.view import page_url as lora_url
from ..lora_files import result_of
from ..markup import capital, inline
from ..media import thumb_url
from ..run_state import FINISHING, doing, left_text
from ..runs import Pictures, Stamp, newest_pictures, page_url
from ..server.language import ENGLISH
from ..server.templates import render
from ..server.translation import Words, words
from ..workplace import Workplace
from .times import dataset_of

MAX_ENDED = 30
_PICTURE_PX = 192
# So long Undo is offered for what was removed, of the last few.
_UNDO_WITHIN_S = 600.0
_UNDO_MAX = 3
_LOG_LINES = 20
# As much of a card's UUID as tells the cards of a machine apart.
_DEVICE_LENGTH = 12
_LOG_END_BYTES = 16_384
# What the record of a run still says that goes on, until its new process has written its own.
_BEFORE = frozenset({"stopped", "interrupted", "failed"})
# What an error ends with that nobody foresaw; the others say what to do.
_FAULT_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """An item of the queue; `url` leads to its run, empty before it has one."""

    id: str
    name: str
    url: str
    command: str
    base: str
    picture: str
    is_slider: bool
    learns: str = ""
    """What it learns from, of one that trains or waits."""

    @classmethod
    def facts(cls, work: Workplace, item: Item) -> Mapping[str, Any]:
        """Return what every row says of its item."""
        return {
            "id": item.id,
            "name": _name(item),
            "url": page_url(item.run) if item.run else "",
            "command": command_line(item.argv) if item.argv else "",
            "base": _base(work, item),
            "picture": _picture(work, item),
            "is_slider": _is_slider(dataset_of(item)),
        }


@dataclass(frozen=True, kw_only=True)
class Running(Row):
    """An item that trains, or whose base model comes."""

    said: str
    left: str
    left_from: str
    finishes: str
    device: str
    percent: float
    stops: bool


@dataclass(frozen=True, kw_only=True)
class Ended(Row):
    """An item that trains no more; where it did not finish, what was found, what to do, the end of its log."""

    state: str
    when: str
    resumes: bool
    found: str
    fix: str
    log: Sequence[str]
    good: str
    """How good the LoRA is that it made."""
    lora: str
    """The page of that, empty without one."""


def stamp(work: Workplace) -> Stamp:
    """Return a value that changes when the view does; raises MachineError."""
    items = commands.items(work.runs)
    runs = [_status(work, item) for item in items if item.state == "running"]
    seen = [(run.step, run.done, run.message) for run in runs if run is not None]
    stopping = [item.id for item in items if _is_stopping(work, item)]
    downloads = [commands.download_of(work.runs, item) for item in items]
    line = worker_line(work, items, words(ENGLISH))
    return (items, *seen, *stopping, *downloads, line, _undone(work), read_rules(work.runs))


def view(work: Workplace, said: Words) -> Html:
    """Return the whole queue; raises MachineError for one that cannot be listed."""
    return render("queue/list.html", said, **shown(work, said))


def shown(work: Workplace, said: Words) -> Mapping[str, Any]:
    """Return what list.html shows; raises MachineError for a queue that cannot be listed."""
    items = commands.items(work.runs)
    ended = [item for item in items if item.has_ended]
    return {
        "removed": [Row(**Row.facts(work, item)) for item in _undone(work)],
        "line": worker_line(work, items, said),
        "rules": read_rules(work.runs),
        "trains": any(item.state == "running" for item in items),
        "running": [_running(work, item, said) for item in items if item.state == "running"],
        "waiting": [
            Row(**Row.facts(work, item), learns=_learns(work, item, said))
            for item in items
            if item.state == "waiting"
        ],
        "ended": [_ended(work, item, said) for item in ended[:MAX_ENDED]],
        "left_out": len(ended) - MAX_ENDED,
        "has_finished": bool(_finished(items)),
        "inline": inline,
    }


def goes(work: Workplace) -> bool:
    """Whether anything trains or waits, so that the view may change by itself."""
    return any(not item.has_ended for item in commands.items(work.runs))


def _undone(work: Workplace) -> Sequence[Item]:
    """Return what was removed a moment ago."""
    return commands.removed(work.runs, within_s=_UNDO_WITHIN_S)[:_UNDO_MAX]


def worker_line(work: Workplace, found: Sequence[Item], said: Words) -> str:
    """Say who works through the queue, and what it waits for."""
    running = [item for item in found if item.state == "running"]
    waiting = [item for item in found if item.state == "waiting"]
    kept = read_rules(work.runs)
    if not running and not waiting and not kept.paused:
        return said("Nothing waits. A training that you start begins at once.")
    if kept.paused:
        return said("Paused: nothing starts until you press Go on. What trains goes on.")
    if fault := worker.worker_fault(work.runs):
        return said("The queue cannot work: {}", without_secrets(fault))
    if worker.worker_pid(work.runs) is None:
        return said("The queue is starting.")
    if waiting and not running and kept.when == "idle":
        return said(
            "The next one starts when no other program has used the machine for half a minute."
        )
    if waiting and (why := kept.holds(now_s=time.time(), is_idle=True)):
        return said("The next one waits: {}.", said.message(why))
    others = worker.outside(work.runs, running)
    if waiting and not running and others:
        return said("Waiting for {}, which was started outside of the queue.", others[0])
    return said("The queue works by itself: it goes on when you close this page or the program.")


def press(work: Workplace, *, action: str, id: str, said: Words, place: int | None = None) -> str:
    """Do what a button asks for, or a drag to a `place` from 0; return what was done where the list does not show it.

    Raises RequestError for what cannot be done, MachineError.
    """
    done = ""
    if action in ("up", "down"):
        commands.move(work.runs, id, by=-1 if action == "up" else 1)
    elif action == "to" and place is not None:
        _move_to(work, id, place)
    elif action in ("pause", "pause_all"):
        rules.pause(work.runs, stop=action == "pause_all")
    elif action == "go_on":
        rules.go_on(work.runs)
    elif action == "again":
        commands.again(work.runs, id)
    elif action == "stop":
        done = _stop(work, id, said)
    elif action == "remove":
        commands.remove(work.runs, id)
    elif action == "back":
        commands.put_back(work.runs, id)
    elif action == "clear":
        for item in _finished(commands.items(work.runs)):
            commands.remove(work.runs, item.id)
    else:
        raise RequestError(f"the queue has no button {action!r}", fix="reload the page")
    worker.ensure_worker(work.runs)
    return done


def _move_to(work: Workplace, id: str, place: int) -> None:
    """Put a waiting item at a place of those that wait; raises RequestError for one that does not wait."""
    waiting = [item.id for item in commands.in_order(commands.items(work.runs))]
    if id not in waiting:
        raise RequestError(f"{id} does not wait any more", fix="move one that waits")
    commands.move(work.runs, id, by=place - waiting.index(id))


def _stop(work: Workplace, id: str, said: Words) -> str:
    item = next((item for item in commands.items(work.runs) if item.id == id), None)
    if item is None or item.state != "running":
        raise RequestError(f"{id} does not train", fix="reload the page")
    is_download = item.run is None and commands.download_of(work.runs, item) is not None
    run_actions.withdraw(work, id)
    if item.run is not None:
        return said("Asked to stop: it saves first.")
    if is_download:
        return said("The download ends here; the next training goes on with it.")
    return said("It was stopped before it began.")


def _running(work: Workplace, item: Item, said: Words) -> Running:
    status = _status(work, item)
    fraction = min(1.0, status.step / status.steps) if status and status.steps else 0.0
    left = left_text(status) if status is not None else ""
    message = said.message(_doing(status)).removesuffix(".")
    download = commands.download_of(work.runs, item)
    if download is not None:
        here, whole = bytes_text(download.here_bytes), bytes_text(download.all_bytes)
        fraction = download.here_bytes / download.all_bytes
        message = said("downloading the base model {}: {} of {}", download.source, here, whole)
    return Running(
        **Row.facts(work, item),
        learns=_learns(work, item, said),
        said=message,
        left=said.message(left) if not download and left != FINISHING else "",
        left_from=_left_from(status, said),
        finishes=said.message(_finishes(status))
        if status is not None and left and not download
        else "",
        device=item.device[:_DEVICE_LENGTH] if item.device else "",
        percent=100 * fraction,
        stops=_is_stopping(work, item),
    )


def _doing(status: RunStatus | None) -> str:
    """Return what an item does: its step and loss while it trains, what it works at before and between."""
    if status is None or status.state in _BEFORE:
        return "starting"
    if status.state == "finished":  # its process ends in a moment
        return FINISHING
    says_itself = status.state != "running" or status.phase == "train"
    return status.message if says_itself else doing(status)


def _ended(work: Workplace, item: Item, said: Words) -> Ended:
    resumes = commands.resumes(work.runs, item)
    found, fix = _reason(item, said, resumes=resumes)
    log = commands.item_file(work.runs, item.id, "log")
    run = work.runs / item.run if item.run and item.state == "finished" else None
    made = result_of(run) if run is not None and run.is_dir() else None
    return Ended(
        **Row.facts(work, item),
        state=item.state,
        when=said.message(clock_text(item.ended_s or 0.0, now_s=time.time())),
        resumes=resumes,
        found=found,
        fix=fix,
        log=_log_end(log) if found and item.state == "failed" else [],
        good=made.validation if made is not None else "",
        lora=lora_url(made.file) if made is not None else "",
    )


def _reason(item: Item, said: Words, *, resumes: bool) -> tuple[str, str]:
    """Return why an item did not finish and what to do; two empty texts where it did."""
    if item.state not in ("failed", "interrupted") or not item.error:
        return "", ""
    found, _, fix = without_secrets(item.error).partition(" Fix: ")
    if item.exit_code == _FAULT_EXIT_CODE:
        found = said("A fault of lora-train or of a library it uses: {}", found)
        fix = said("Read the last lines of its log, below, and report them.")
    if item.state == "interrupted" and resumes:
        fix = said("Resume goes on from the last saved state.")
    found = said.message(found)
    return capital(found), said.message(fix)


def _left_from(status: RunStatus | None, said: Words) -> str:
    """Return what the time left is told from, an empty text where none is told."""
    if status is None or left_text(status) == FINISHING:
        return ""
    return said.message(status.left_from)


def _finishes(status: RunStatus) -> str:
    """Return the time of day at which a training ends, an empty text where it does not say."""
    if status.state in _BEFORE or not math.isfinite(status.left_s) or status.left_s < 0:
        return ""
    now_s = time.time()
    return clock_text(now_s + status.left_s, now_s=now_s)


def _base(work: Workplace, item: Item) -> str:
    """Return the name of an item's base, as its run or its command says it; an empty text for the planner's choice."""
    if item.run:
        with suppress(RequestError):
            if source := read(_run(work, item)).base.source:
                return title(source)
    words = iter(item.argv)
    for word in words:
        if word == "--base" or word.startswith("--base="):
            return title(word.partition("=")[2] or next(words, ""))
    return ""


def _picture(work: Workplace, item: Item) -> str:
    """Return the address of a picture of an item: the newest of its own, else the first image that can be read."""
    drawn = newest_pictures(_run(work, item)) if item.run else Pictures()
    if drawn.files and not drawn.of_base:
        return small_url(drawn.files[0], size_px=_PICTURE_PX)
    folder = dataset_of(item)
    if folder is None:
        return ""
    try:
        allowed = work.allows(folder.resolve()) and folder.is_dir()
        pictures = list_dataset(folder, settings=DataSettings()).pictures if allowed else ()
    except (LoraTrainError, OSError, ValueError):  # which the training itself says
        return ""
    checked = check.known(work, folder, stamp="").values
    rows = [row for row in sequence(checked, "findings") if isinstance(row, dict)]
    broken = {row.get("file") for row in rows if row.get("kind") == "unusable"}
    whole = (picture.name for picture in pictures if picture.name not in broken)
    name = next(whole, "")
    return thumb_url(folder, name, size_px=_PICTURE_PX) if name else ""


def _is_slider(dataset: Path | None) -> bool:
    return dataset is not None and is_slider_file(dataset)


def _learns(work: Workplace, item: Item, said: Words) -> str:
    """Return what a training learns from: how many images, or the words of a slider; empty where that is not known."""
    dataset = dataset_of(item)
    try:
        if dataset is None or not work.allows(dataset.resolve()):
            return ""
        if _is_slider(dataset):
            first = next(iter(slider_words.read(dataset)))
            ends = [text for text in (first.less, first.more) if text]
            return said("a slider: {}", " \u2194 ".join(ends))
        count = len(list_dataset(dataset, settings=DataSettings()).pictures)
    except (LoraTrainError, OSError, ValueError, StopIteration):  # which the training itself says
        return ""
    return said("1 image") if count == 1 else said("{#} images", f"{count:,}")


def _name(item: Item) -> str:
    return item.run or item.label or item.id


def _finished(found: Sequence[Item]) -> list[Item]:
    return [item for item in found if item.state == "finished"]


def _run(work: Workplace, item: Item) -> Path:
    return work.runs / (item.run or "")


def _status(work: Workplace, item: Item) -> RunStatus | None:
    return read_status(_run(work, item)) if item.run else None


def _is_stopping(work: Workplace, item: Item) -> bool:
    asked_for_it = item.state == "running" and item.run is not None
    return asked_for_it and "stop" in Control(_run(work, item)).pending()


def _log_end(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_END_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [one_line(line) for line in without_secrets(text).splitlines()]
    return [line for line in lines if line][-_LOG_LINES:]
