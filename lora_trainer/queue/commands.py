"""The user's actions on the training queue: add, move, remove, start again.

Inputs: the runs folder and the words of a training's command line. Outputs: items in `<runs>/.queue/`
(`items.py`), which a worker process starts (`process.py`). The public names of these two modules
are imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import disk_error
from lora_trainer.common.wording import one_line
from lora_trainer.queue.items import Download as Download
from lora_trainer.queue.items import Item as Item
from lora_trainer.queue.items import changing, download_file, in_order, item_file, new_id, write
from lora_trainer.queue.items import download_of as download_of
from lora_trainer.queue.items import items as items
from lora_trainer.queue.items import log_file as log_file
from lora_trainer.queue.process import ensure_worker as ensure_worker
from lora_trainer.queue.process import settle as settle
from lora_trainer.queue.process import work as work
from lora_trainer.queue.process import worker_fault as worker_fault
from lora_trainer.queue.process import worker_pid as worker_pid
from lora_trainer.queue.worker import outside as outside
from lora_trainer.reporting.status import is_alive, read_status

_LABEL_MAX_LENGTH = 200


def add(
    runs: Path,
    argv: Sequence[str],
    *,
    label: str,
    folder: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Item:
    """Add a training at the end of the queue; `argv` follows `lora-train`, relative paths start at `folder`.

    Raises RequestError for a command that waits or runs already (a double click, a second tab) or that no
    process can be given, MachineError if the disk refuses.
    """
    words, where = tuple(argv), str((folder or Path.cwd()).absolute())
    for word in (*words, where, label):
        _refuse_unspeakable(word)
    with changing(runs):
        present = items(runs)
        for twin in present:
            if not twin.has_ended and (twin.argv, twin.folder) == (words, where):
                raise RequestError(
                    f"this training is in the queue already: {twin.id}, {twin.state}",
                    fix="wait for it, or change a setting, such as its name",
                )
        short_label = one_line(label)[:_LABEL_MAX_LENGTH]
        item = Item(
            id=new_id(runs, label=short_label),
            order=_last_place(present),
            argv=words,
            folder=where,
            label=short_label,
            added_s=clock(),
        )
        write(runs, item)
        return item


def again(runs: Path, id: str) -> Item:
    """Put an ended item at the end of the queue again; one that ended early resumes its run.

    Raises RequestError for an item that has not ended or whose file is damaged, MachineError if the disk
    refuses.
    """
    with changing(runs):
        present = items(runs)
        item = _chosen(present, id)
        if not item.has_ended:
            raise RequestError(f"{id} is {item.state} already", fix="wait for it")
        if not item.argv:
            raise RequestError(
                f"{id} cannot be started: {item.error}", fix="remove it and add the training again"
            )
        item = Item(
            id=item.id,
            order=_last_place(present),
            argv=_resuming(runs, item),
            folder=item.folder,
            label=item.label,
            added_s=item.added_s,
        )
        write(runs, item)
        return item


def move(runs: Path, id: str, *, by: int) -> None:
    """Move a waiting item by places: -1 is one earlier, +1 one later; at either end it stays.

    Raises RequestError for an item that does not wait, MachineError if the disk refuses.
    """
    with changing(runs):
        present = items(runs)
        item = _chosen(present, id)
        if item.state != "waiting":
            raise RequestError(f"{id} is {item.state}", fix="move a waiting item")
        waiting = in_order(present)
        index = waiting.index(item)
        waiting.insert(min(max(index + by, 0), len(waiting) - 1), waiting.pop(index))
        # Two files cannot change at once; after a crash in between the order is valid, but may be another.
        for order, other in enumerate(waiting, start=1):
            if other.order != order:
                write(runs, replace(other, order=order))


def remove(runs: Path, id: str) -> None:
    """Delete a waiting or ended item and its log; its run folder stays.

    Raises RequestError for a running item, MachineError if the disk refuses.
    """
    with changing(runs):
        item = _chosen(items(runs), id)
        if item.state == "running":
            raise RequestError(f"{id} is running", fix="stop its training first, then remove it")
        file = item_file(runs, id)
        try:
            file.unlink()
            log_file(runs, id).unlink(missing_ok=True)
            download_file(runs, id).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error


def end_download(item: Item) -> None:
    """End the trainer of an item that downloads its base: nothing was trained, and what came stays."""
    if item.pid is None or item.pid_started_s is None:
        return
    with suppress(psutil.Error):
        if is_alive(pid=item.pid, started_s=item.pid_started_s):
            psutil.Process(item.pid).terminate()


def _last_place(present: Sequence[Item]) -> int:
    return 1 + max((item.order for item in present if item.state == "waiting"), default=0)


def _chosen(present: Sequence[Item], id: str) -> Item:
    """Return the item with this id; only listed ids are accepted, so none can point outside the queue."""
    for item in present:
        if item.id == id:
            return item
    raise RequestError(
        f"there is no item {id!r} in the queue", fix="`lora-train queue list` lists all items"
    )


def resumes(runs: Path, item: Item) -> bool:
    """Return whether `again` goes on with the run of an ended item; it may have finished since."""
    if item.state == "finished" or item.run is None or not (runs / item.run).is_dir():
        return False
    return read_status(runs / item.run).state not in ("running", "finished")


def _resuming(runs: Path, item: Item) -> tuple[str, ...]:
    """Return the command that resumes an item's run if it ended early, else the item's own command."""
    if any(word.startswith("--resume") for word in item.argv) or not resumes(runs, item):
        return item.argv
    return ("--resume-from", str((runs / str(item.run)).absolute()), *item.argv)


def _refuse_unspeakable(word: str) -> None:
    try:
        speakable = b"\0" not in word.encode()
    except UnicodeEncodeError:
        speakable = False
    if not speakable:
        raise RequestError(
            f"{ascii(word)} cannot be part of a command", fix="use ordinary characters"
        )
