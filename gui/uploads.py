"""Takes pictures and captions that a browser sent into a folder of ours; `archives` does so for a zip.

Inputs: files that gradio has put into `<runs>/.gui/incoming/`, with the names that the browser gave.
Outputs: `<runs>/.gui/uploads/NAME/` with the pictures and captions, each whole; what was left out is
told by name.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.errors import InputError
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, retry_while_open

from .archives import Received
from .asset_files import EXAMPLE
from .upload_names import Names, is_image, numbered, reason_against, safe_name
from .workplace import Workplace

FOLDER, INCOMING = "uploads", "incoming"
EXAMPLE_NAME = "example"
_NAME_MAX_BYTES = 150


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that a browser sent: where it lies, and the name that the browser gave it."""

    path: Path
    name: str


def upload_folder(work: Workplace, name: str) -> Path:
    """Return a free place for a new dataset of that name."""
    wanted = safe_name(name) or "dataset"
    parent = work.own / FOLDER
    return next(parent / free for free in numbered(wanted) if not (parent / free).exists())


def save_files(work: Workplace, files: Iterable[Upload], *, into: Path) -> Received:
    """Put uploaded pictures and captions into a folder of `work.own`, new or not.

    Names are made safe and unique, picture and caption of one name alike. Raises InputError for
    files that were not uploaded here, MachineError when the disk refuses.
    """
    incoming = (work.own / INCOMING).resolve()
    uploaded = list(files)
    for upload in uploaded:
        if not upload.path.resolve().is_relative_to(incoming):
            raise InputError(f"{upload.name!r} was not uploaded", fix="choose the files once more")
    images = captions = 0
    left_out: list[str] = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        names = Names([path.name for path in into.iterdir()])
        for upload in uploaded:
            name = safe_name(upload.name)
            reason = reason_against(name)
            if reason:
                left_out.append(f"{upload.name}: {reason}")
                continue
            _move(upload.path, into / names.free(name))
            images += is_image(name)
            captions += not is_image(name)
    except OSError as error:
        raise disk_error(into, error) from error
    return Received(folder=into, images=images, captions=captions, left_out=tuple(left_out))


def _move(source: Path, target: Path) -> None:
    """Copy first: a reader sees the whole file or none, also across filesystems."""
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}"[:_NAME_MAX_BYTES])
    try:
        shutil.copyfile(source, temporary)
        retry_while_open(lambda: temporary.rename(target))
    finally:
        temporary.unlink(missing_ok=True)


def example(work: Workplace) -> Path:
    """Return a copy of the example's images among the uploads, made at the first time.

    A copy, because what is installed is not to be changed by captions that somebody edits.
    Raises MachineError when the disk refuses.
    """
    folder = work.own / FOLDER / EXAMPLE_NAME
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{EXAMPLE_NAME}-{time.monotonic_ns()}")
    try:
        temporary.mkdir(parents=True)
        for file in EXAMPLE.iterdir():
            if not reason_against(file.name):
                shutil.copyfile(file, temporary / file.name)
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another tab was faster
            raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def forget_old(folder: Path, *, kept_s: float) -> None:
    """Remove what an interface that was killed has left of uploads, after some time."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.is_dir() and time.time() - path.stat().st_mtime > kept_s:
                    shutil.rmtree(path, ignore_errors=True)
