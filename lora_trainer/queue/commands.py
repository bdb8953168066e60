"""The training queue as files, and the user's actions on it: add, move, remove, start again.

Inputs: the runs folder, the words of a training's command line, and the files in `<runs>/.queue/`, even damaged
ones. An item is one JSON file, `ID.json`, always replaced whole and changed under one lock, with `ID.log`, its
trainer's output, and `ID.download` while its base comes. Reading takes no lock and changes nothing. A worker
process (`worker.py`) starts the items.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.event_kinds import Event, Phase
from lora_trainer.common.events import Listener
from lora_trainer.common.files import disk_error, json_bytes, locked, read_regular, write_atomic
from lora_trainer.common.processes import is_alive
from lora_trainer.common.records import MOST_STEPS
from lora_trainer.common.wording import one_line
from lora_trainer.reporting.status import Time, read_status

State = Literal["waiting", "running", "finished", "stopped", "failed", "interrupted"]

FOLDER = ".queue"
# Environment variable with a trainer's item, beside whose file it writes how far a download is.
ITEM_VARIABLE = "LORA_TRAIN_QUEUE_ITEM"
_LOCK_FILE = ".lock"
_REMOVED = "removed"
_REMOVED_KEPT_S = 24 * 3600.0
_LAST_NUMBER_FILE = ".last-number"
_LOCK_WITHIN_S = 10.0
_SLUG_MAX_LENGTH = 40
# The name of an item has at most nine digits; a damaged counter must not lead beyond them.
MOST_ITEMS = 999_999_998
_ITEM_FILE = re.compile(r"([0-9]{1,9})(-[a-z0-9-]+)?\.json")


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\"):
        raise ValueError("not a folder name")
    return name


@dataclass(frozen=True, kw_only=True)
class Item:
    """A training that waits, runs or has ended; times are Unix times in seconds.

    Relative paths in `argv` start at `folder`. `device` is the trainer's CUDA_VISIBLE_DEVICES, `run` the
    name of its run folder. `pid` and `pid_started_s` together identify the process, as systems reuse pids.
    """

    id: str
    order: Annotated[int, Field(ge=0, le=MOST_STEPS)]
    argv: tuple[str, ...]
    folder: str
    label: str
    state: State = "waiting"
    added_s: Time
    started_s: Time | None = None
    ended_s: Time | None = None
    device: str = ""
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    pid_started_s: Time | None = None
    run: Annotated[str, AfterValidator(_folder_name)] | None = None
    exit_code: Annotated[int, Field(ge=-(2**31), lt=2**32)] | None = None
    error: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")


_ITEM = TypeAdapter(Item)


def queue_folder(runs: Path) -> Path:
    """Return the folder of a runs folder's queue."""
    return runs / FOLDER


def item_file(runs: Path, id: str, kind: Literal["json", "log", "download"] = "json") -> Path:
    """Return a file of an item, `id` from a listing: the item, its trainer's output, how far a download is."""
    return queue_folder(runs) / f"{id}.{kind}"


@dataclass(frozen=True, kw_only=True)
class Download:
    """How much of a base is on this machine, of the bytes that were missing."""

    source: str
    here_bytes: Annotated[int, Field(ge=0)]
    all_bytes: Annotated[int, Field(gt=0)]


_DOWNLOAD = TypeAdapter(Download)


def download_of(runs: Path, item: Item) -> Download | None:
    """Return how far the download of a running item's base is, None where nothing is downloaded."""
    if item.state != "running" or item.run is not None:
        return None
    try:
        download = _DOWNLOAD.validate_json(
            read_regular(item_file(runs, item.id, "download")), strict=True
        )
    except (OSError, ValidationError):
        return None
    return download if download.here_bytes < download.all_bytes else None


def download_listeners(environment: Mapping[str, str]) -> tuple[Listener, ...]:
    """Return a listener that writes how far the download of a queued trainer's base is; none for others."""
    item_stem = environment.get(ITEM_VARIABLE)
    if item_stem is None:
        return ()

    def write_download(event: Event) -> None:
        if not isinstance(event, Phase) or event.phase != "download":
            return
        record = {"source": event.message, "here_bytes": event.done, "all_bytes": event.total}
        with suppress(MachineError):  # a full disk ends the download itself, with its reason
            write_atomic(Path(f"{item_stem}.download"), json_bytes(record), durable=False)

    return (write_download,)


def items(runs: Path) -> tuple[Item, ...]:
    """Return running items, then waiting ones in order, then ended ones, the newest first.

    A damaged file becomes a failed item with the reason. Raises MachineError if the queue cannot be listed.
    """
    listed = [item for path in _item_files(runs) if (item := _read(path)) is not None]
    running = [item for item in listed if item.state == "running"]
    running.sort(key=lambda item: (item.started_s or 0.0, item.id))
    ended = [item for item in listed if item.has_ended]
    ended.sort(key=lambda item: (item.ended_s or 0.0, item.id), reverse=True)
    return (*running, *in_order(listed), *ended)


def in_order(listed: Sequence[Item]) -> list[Item]:
    """Return the waiting items, the next one first."""
    waiting = (item for item in listed if item.state == "waiting")
    return sorted(waiting, key=lambda item: (item.order, item.id))


@contextmanager
def changing(runs: Path) -> Iterator[None]:
    """Hold the queue's lock while the block runs; raises MachineError if it is not free in time.

    Every block takes milliseconds. The lock does not nest.
    """
    folder = queue_folder(runs)
    busy = MachineError(
        f"the queue in {folder} has been locked for {_LOCK_WITHIN_S:.0f} s",
        fix="end the process that holds the lock, perhaps a suspended one",
    )
    with locked(folder / _LOCK_FILE, within_s=_LOCK_WITHIN_S, busy=busy):
        yield


def write(runs: Path, item: Item) -> None:
    """Replace the file of an item; only inside `changing`. Raises MachineError."""
    write_atomic(item_file(runs, item.id), json_bytes(asdict(item)))


def new_id(runs: Path, *, label: str) -> str:
    """Return an id that no item ever had; call it inside `changing`. Raises MachineError.

    Ids are never reused, or an outdated page could act on another item than it shows.
    """
    counter = queue_folder(runs) / _LAST_NUMBER_FILE
    matches = [_ITEM_FILE.fullmatch(path.name) for path in _item_files(runs)]
    try:
        last = min(MOST_ITEMS, int(read_regular(counter)))
    except (OSError, ValueError):  # missing or damaged: the existing items tell the last number too
        last = 0
    number = 1 + max([last, *(int(match[1]) for match in matches if match)])
    write_atomic(counter, str(number).encode(), durable=False)
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower())[:_SLUG_MAX_LENGTH].strip("-")
    return f"{number:04d}-{slug or 'training'}"


def _item_files(runs: Path) -> list[Path]:
    folder = queue_folder(runs)
    try:
        return [path for path in folder.iterdir() if _ITEM_FILE.fullmatch(path.name)]
    except FileNotFoundError:  # nothing was ever added
        return []
    except OSError as error:
        raise MachineError(
            f"cannot read the queue in {folder}: {error.strerror or error}",
            fix="make it a folder that you may read",
        ) from error


def _read(path: Path) -> Item | None:
    """Return the item in a file, a failed item if it is damaged, None if it was removed."""
    try:
        item = _ITEM.validate_json(read_regular(path), strict=True)
    except FileNotFoundError:  # removed since the folder was listed
        return None
    except RecursionError:
        return _damaged(path, "it is nested too deeply")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return _damaged(path, f"{where}: {first['msg']}" if where else first["msg"])
    except OSError as error:
        return _damaged(path, error.strerror or str(error))
    return replace(item, id=path.stem)


def _damaged(path: Path, reason: str) -> Item:
    try:
        changed_s = path.stat().st_mtime
    except OSError:
        changed_s = 0.0
    return Item(
        id=path.stem,
        order=0,
        argv=(),
        folder="",
        label=path.stem,
        state="failed",
        added_s=changed_s,
        ended_s=changed_s,
        error=one_line(f"{path.name} is damaged: {reason}"),
    )


_LABEL_MAX_LENGTH = 200


def add(
    runs: Path,
    argv: Sequence[str],
    *,
    label: str,
    folder: Path | None = None,
) -> Item:
    """Add a training at the end of the queue; `argv` follows `lora-train`, relative paths start at `folder`.

    Raises RequestError for a command that waits or runs already (a double click, a second tab) or that no
    process can be given, MachineError if the disk refuses.
    """
    words, where = tuple(argv), str((folder or Path.cwd()).absolute())
    for word in (*words, where, label):
        if "\0" in word or word.encode("utf-8", "replace").decode() != word:
            raise RequestError(
                f"{ascii(word)} cannot be part of a command", fix="use ordinary characters"
            )
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
            added_s=time.time(),
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
        argv = item.argv
        if not any(word.startswith("--resume") for word in argv) and resumes(runs, item):
            argv = ("--resume-from", str((runs / str(item.run)).absolute()), *argv)
        item = Item(
            id=item.id,
            order=_last_place(present),
            argv=argv,
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
    """Take a waiting or ended item and its log out of the queue; its run folder stays.

    `put_back` takes it in again; of items removed long ago nothing stays. Raises RequestError for a
    running item, MachineError if the disk refuses.
    """
    with changing(runs):
        item = _chosen(items(runs), id)
        if item.state == "running":
            raise RequestError(f"{id} is running", fix="stop its training first, then remove it")
        file = item_file(runs, id)
        for path in (item_file(runs, id, "log"), file):
            if path.is_dir():  # not of the queue; what is removed is forgotten after a while
                raise disk_error(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
        try:
            _forget_removed(runs)
            (queue_folder(runs) / _REMOVED).mkdir(exist_ok=True)
            os.utime(file)  # when it was removed
            for path in (item_file(runs, id, "log"), file):  # the item last: it is what is put back
                with suppress(FileNotFoundError):
                    path.replace(_removed_file(path))
            item_file(runs, id, "download").unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error


def put_back(runs: Path, id: str) -> Item:
    """Take a removed item into the queue again, where it was; raises RequestError, MachineError."""
    with changing(runs):
        item = next((item for item in removed(runs) if item.id == id), None)
        if item is None:
            raise RequestError(f"{id!r} is not among the removed items", fix="add it once more")
        file = item_file(runs, id)
        try:
            for path in (item_file(runs, id, "log"), file):
                with suppress(FileNotFoundError):
                    _removed_file(path).replace(path)
        except OSError as error:
            raise disk_error(file, error) from error
        return item


def removed(runs: Path, *, within_s: float = _REMOVED_KEPT_S) -> tuple[Item, ...]:
    """Return the items removed not long ago, the last one first."""
    try:
        paths = [(path.stat().st_mtime, path) for path in _removed_paths(runs)]
    except OSError:  # put back, or forgotten, meanwhile
        return ()
    recent = sorted((pair for pair in paths if time.time() - pair[0] < within_s), reverse=True)
    return tuple(item for _, path in recent if (item := _read(path)) is not None)


def _removed_file(path: Path) -> Path:
    return path.parent / _REMOVED / path.name


def _removed_paths(runs: Path) -> list[Path]:
    """Return the files of removed items; a folder among them is somebody's own, and stays."""
    folder = queue_folder(runs) / _REMOVED
    with suppress(OSError):
        return [
            path for path in folder.iterdir() if _ITEM_FILE.fullmatch(path.name) and path.is_file()
        ]
    return []


def _forget_removed(runs: Path) -> None:
    for path in _removed_paths(runs):
        if time.time() - path.stat().st_mtime > _REMOVED_KEPT_S:
            path.unlink(missing_ok=True)
            if (log := path.with_suffix(".log")).is_file():
                log.unlink(missing_ok=True)


def end_without_run(item: Item) -> None:
    """End the trainer of an item that has no run yet: nothing was trained, and what it downloaded stays."""
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
        f"the queue has no item {id!r}", fix="`lora-train queue list` lists all items"
    )


def resumes(runs: Path, item: Item) -> bool:
    """Return whether `again` goes on with the run of an ended item; it may have finished since."""
    if item.state == "finished" or item.run is None or not (runs / item.run).is_dir():
        return False
    return read_status(runs / item.run).state not in ("running", "finished")
