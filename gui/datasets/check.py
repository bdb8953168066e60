"""What `lora-train check --json` says of a dataset folder, kept until the pictures change.

Inputs: the folder and how it would be trained (base, size). Output: the command's JSON, in
`<runs>/.gui/checks/`, with a stamp of what it was about, so that a reload shows it at once and a
changed picture asks for a new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, read_json_object, write_atomic
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import ImageFile, list_dataset

from ..command_lines import Words, ask
from ..workplace import Workplace
from .journal import dataset_key


@dataclass(frozen=True, kw_only=True)
class Check:
    """An answer, or the line in which the command refused; `fresh`: nothing has changed since."""

    values: Mapping[str, Any]
    error: str = ""
    fresh: bool = False


def known(work: Workplace, root: Path, *, stamp: str) -> Check:
    """Return what was answered last, an empty one when nothing was."""
    try:
        kept = read_json_object(_file(work, root))
    except RequestError:  # none yet, or damaged: it is asked for again
        return Check(values={})
    values = kept.get("values")
    return Check(
        values=values if isinstance(values, dict) else {},
        error=str(kept.get("error", "")),
        fresh=kept.get("stamp") == stamp,
    )


def run(work: Workplace, root: Path, words: Words, *, stamp: str) -> Check:
    """Ask, unless somebody else has just asked the same; takes seconds. Raises MachineError."""
    file = _file(work, root)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error
    with FileLock(file.with_suffix(".lock")):
        before = known(work, root, stamp=stamp)
        if before.fresh:
            return before
        answer = ask(words)
        values = answer.values or {}
        kept = {"stamp": stamp, "error": answer.error, "values": dict(values)}
        write_atomic(file, json_bytes(kept), durable=False)
        return Check(values=values, error=answer.error, fresh=True)


def remember(work: Workplace, root: Path, words: Words, values: Mapping[str, Any]) -> None:
    """Keep an answer that another page has asked for, so that this one need not; a full disk keeps none."""
    with suppress(LoraTrainError, OSError):
        pictures = list_dataset(root, settings=DataSettings()).pictures
        kept = {"stamp": stamp_of(pictures, words), "error": "", "values": dict(values)}
        file = _file(work, root)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json_bytes(kept), durable=False)


def stamp_of(pictures: Iterable[ImageFile], words: Words) -> str:
    """Return a value that changes with any picture file and with how it would be trained."""
    digest = hashlib.sha256(repr(words).encode("utf-8", "surrogateescape"))
    for picture in pictures:
        row: tuple[object, ...] = (picture.name,)
        with suppress(OSError):  # removed meanwhile: another stamp, as it should be
            found = picture.path.stat()
            row = (picture.name, found.st_size, found.st_mtime_ns)
        if picture.crop is not None:
            row = (*row, picture.crop)
        digest.update(repr(row).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _file(work: Workplace, root: Path) -> Path:
    return work.own / "checks" / f"{dataset_key(root)}.json"
