"""The files of the training queue: one JSON file an item, replaced whole, changed under one lock.

Inputs: the runs folder; what lies in its `.queue/`, damaged files too. Outputs: `Item`s in the order
in which people read them, and `ID.json` beside `ID.log`, what the trainer of that item said. Reading
takes no lock and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import json_bytes, locked, write_atomic
from lora_trainer.common.wording import one_line

State = Literal["waiting", "running", "finished", "stopped", "failed", "interrupted"]

FOLDER = ".queue"
_LOCK_FILE = ".lock"
_LAST_NUMBER_FILE = ".last-number"
_LOCK_WITHIN_S = 10.0
_SLUG_MAX_LENGTH = 40
_MAX_TIME_S = 4e9
"""Later than any time that a calendar of every system shows: 2096."""
_ITEM_FILE = re.compile(r"([0-9]{1,9})(-[a-z0-9-]+)?\.json")


Time = Annotated[float, Field(ge=0, le=_MAX_TIME_S, allow_inf_nan=False)]


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\"):
        raise ValueError("no name of a folder")
    return name


@dataclass(frozen=True, kw_only=True)
class Item:
    """A training that waits, runs or has ended; times are Unix times.

    `folder` is where relative paths in `argv` begin. `device` is what the trainer was given as
    CUDA_VISIBLE_DEVICES, `run` the name of its run folder. `pid` with its start names the process.
    """

    id: str
    order: int
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
    exit_code: int | None = None
    error: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")


_ITEM = TypeAdapter(Item)


def queue_folder(runs: Path) -> Path:
    """Return where the queue of a runs folder lies."""
    return runs / FOLDER


def item_file(runs: Path, id: str) -> Path:
    """Return the file of an item; `id` must come from a listing."""
    return queue_folder(runs) / f"{id}.json"


def log_file(runs: Path, id: str) -> Path:
    """Return what the trainer of an item said, missing before it starts; `id` as above."""
    return queue_folder(runs) / f"{id}.log"


def items(runs: Path) -> tuple[Item, ...]:
    """Return what runs, then what waits, in order, then what has ended, the newest first.

    A damaged file is an item that failed, with the reason. Raises MachineError for a queue that
    cannot be listed.
    """
    found = [item for path in _item_files(runs) if (item := _read(path)) is not None]
    running = [item for item in found if item.state == "running"]
    running.sort(key=lambda item: (item.started_s or 0.0, item.id))
    ended = [item for item in found if item.has_ended]
    ended.sort(key=lambda item: (item.ended_s or 0.0, item.id), reverse=True)
    return (*running, *in_order(found), *ended)


def in_order(found: Sequence[Item]) -> list[Item]:
    """Return those that wait, the next one first."""
    waiting = (item for item in found if item.state == "waiting")
    return sorted(waiting, key=lambda item: (item.order, item.id))


@contextmanager
def changing(runs: Path) -> Iterator[None]:
    """Be the only one who changes the queue while the block runs; raises MachineError.

    Held for milliseconds. It does not nest.
    """
    folder = queue_folder(runs)
    busy = MachineError(
        f"the queue in {folder} has been locked for {_LOCK_WITHIN_S:.0f} s",
        fix="end the process that holds it, maybe one that was suspended",
    )
    with locked(folder / _LOCK_FILE, within_s=_LOCK_WITHIN_S, busy=busy):
        yield


def write(runs: Path, item: Item) -> None:
    """Replace the file of an item; only inside `changing`. Raises MachineError."""
    write_atomic(item_file(runs, item.id), json_bytes(asdict(item)))


def new_id(runs: Path, *, label: str) -> str:
    """Return a name no item had before: a page out of date must not name another; inside `changing`.

    Raises MachineError.
    """
    counter = queue_folder(runs) / _LAST_NUMBER_FILE
    matches = [_ITEM_FILE.fullmatch(path.name) for path in _item_files(runs)]
    try:
        last = int(counter.read_bytes())
    except (OSError, ValueError):  # the first, or damaged: the items that are left count too
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
    """Return the item in a file, one that failed where it is damaged, None where it is gone."""
    try:
        item = _ITEM.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:  # removed since the folder was listed
        return None
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
