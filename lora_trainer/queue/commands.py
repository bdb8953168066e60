"""The training queue as people use it: add, move, remove, start again.

Inputs: the runs folder and the words of a training's command line. Outputs: items in `<runs>/.queue/`
(`items.py`), which one worker a queue works through (`process.py`). What others need of
these two is here by the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import disk_error
from lora_trainer.common.wording import one_line
from lora_trainer.queue.items import Item as Item
from lora_trainer.queue.items import changing, in_order, item_file, new_id, write
from lora_trainer.queue.items import items as items
from lora_trainer.queue.items import log_file as log_file
from lora_trainer.queue.process import ensure_worker as ensure_worker
from lora_trainer.queue.process import settle as settle
from lora_trainer.queue.process import work as work
from lora_trainer.queue.process import worker_fault as worker_fault
from lora_trainer.queue.process import worker_pid as worker_pid
from lora_trainer.queue.worker import outside as outside

_LABEL_MAX_LENGTH = 200


def add(
    runs: Path,
    argv: Sequence[str],
    *,
    label: str,
    folder: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Item:
    """Put a training behind all that wait; `argv` is what follows `lora-train`, `folder` its place.

    Raises RequestError for a command that waits or runs already (a double click, a second tab) or
    that no process can be given, MachineError when the disk refuses.
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
                    fix="wait for it, or change something, such as its name",
                )
        shown = one_line(label)[:_LABEL_MAX_LENGTH]
        item = Item(
            id=new_id(runs, label=shown),
            order=_last_place(present),
            argv=words,
            folder=where,
            label=shown,
            added_s=clock(),
        )
        write(runs, item)
        return item


def again(runs: Path, id: str) -> Item:
    """Let an item that has ended wait once more; one that ended early goes on with its run.

    Raises RequestError for an item that has not ended or whose file is damaged, and MachineError.
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
            argv=_going_on(runs, item),
            folder=item.folder,
            label=item.label,
            added_s=item.added_s,
        )
        write(runs, item)
        return item


def move(runs: Path, id: str, *, by: int) -> None:
    """Let a waiting item change places: -1 is one earlier, +1 one later; at an end it stays.

    Raises RequestError for an item that does not wait, MachineError when the disk refuses.
    """
    with changing(runs):
        present = items(runs)
        item = _chosen(present, id)
        if item.state != "waiting":
            raise RequestError(f"{id} is {item.state}", fix="move one that waits")
        waiting = in_order(present)
        place = waiting.index(item)
        waiting.insert(min(max(place + by, 0), len(waiting) - 1), waiting.pop(place))
        # Two files cannot change at once: a crash in between leaves an order, if not this one.
        for order, other in enumerate(waiting, start=1):
            if other.order != order:
                write(runs, replace(other, order=order))


def remove(runs: Path, id: str) -> None:
    """Forget an item that waits or has ended, and its log; its run folder stays.

    Raises RequestError for one that runs, MachineError when the disk refuses.
    """
    with changing(runs):
        item = _chosen(items(runs), id)
        if item.state == "running":
            raise RequestError(f"{id} is running", fix="stop its training first, then remove it")
        file = item_file(runs, id)
        try:
            file.unlink()
            log_file(runs, id).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error


def _last_place(present: Sequence[Item]) -> int:
    return 1 + max((item.order for item in present if item.state == "waiting"), default=0)


def _chosen(present: Sequence[Item], id: str) -> Item:
    """Return the item of that name; only what is listed can be named, so no name leads elsewhere."""
    for item in present:
        if item.id == id:
            return item
    raise RequestError(
        f"there is no item {id!r} in the queue", fix="`lora-train queue list` names them"
    )


def _going_on(runs: Path, item: Item) -> tuple[str, ...]:
    """Return the command that goes on with an item's run where it ended early, else its own."""
    resumes = any(word.startswith("--resume") for word in item.argv)
    if item.state == "finished" or item.run is None or resumes:
        return item.argv
    run = (runs / item.run).absolute()
    return ("--resume-from", str(run), *item.argv) if run.is_dir() else item.argv


def _refuse_unspeakable(word: str) -> None:
    try:
        speakable = b"\0" not in word.encode()
    except UnicodeEncodeError:
        speakable = False
    if not speakable:
        raise RequestError(
            f"{ascii(word)} cannot be a word of a command", fix="use ordinary characters"
        )
