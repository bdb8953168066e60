"""Entries of a dataset folder: their names and kinds, by which a walk tells what is to learn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from lora_trainer.common.errors import InputError
from lora_trainer.common.events import shown
from lora_trainer.dataset.captions import split_name
from lora_trainer.dataset.images import IMAGE_EXTENSIONS

Entry = os.DirEntry[str]
FolderKind = Literal["mask", "control", "class"]
_IGNORED_NAMES = frozenset({"__macosx", "thumbs.db", "desktop.ini"})
_DOCUMENT_STEMS = frozenset({"readme", "license", "licence"})
_FOLDER_KINDS: Mapping[str, FolderKind] = {
    **dict.fromkeys(("masks", "mask"), "mask"),
    **dict.fromkeys(
        ("control", "controls", "control_images", "conditioning", "conditioning_images"), "control"
    ),
    **dict.fromkeys(("class", "class_images", "class_data", "reg", "reg_images"), "class"),
    **dict.fromkeys(("regularization", "regularisation"), "class"),
    **dict.fromkeys(("regularization_images", "regularisation_images"), "class"),
}
"""Folders that other trainers keep beside the images to learn."""
CONTROL_SUFFIX = "-condlabel"
"""End of the name of a control image beside its image, as OneTrainer has it."""


def folder_kind(name: str) -> FolderKind | None:
    """Return the kind of images that a folder holds by its name; None: images to learn."""
    return _FOLDER_KINDS.get(name.casefold())


def entries_in(path: Path | str) -> list[Entry]:
    """Return a folder's entries by name, without system files and documents; raises InputError."""
    try:
        with os.scandir(path) as entries:
            meant = [entry for entry in entries if _is_meant(entry.name)]
    except OSError as error:
        what = f"cannot read folder {shown(str(path))} ({error.strerror or error})"
        raise InputError(what, fix="make it readable or move it away") from None
    return sorted(meant, key=lambda entry: entry.name)


def _is_meant(name: str) -> bool:
    folded = name.casefold()
    stem, extension = split_name(folded)
    is_document = stem in _DOCUMENT_STEMS and extension not in IMAGE_EXTENSIONS
    return not (name.startswith(".") or folded in _IGNORED_NAMES or is_document)


def text_of(name: str) -> str:
    """Return a file name as text: it may hold bytes that are not UTF-8, which no JSON file can."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def holds(question: Callable[[], bool]) -> bool:
    """Ask something of an entry; one that cannot be followed is nothing."""
    try:
        return question()
    except OSError:  # a loop of links
        return False


def is_inside(path: str, real_root: str) -> bool:
    """Say whether a path, its links followed, lies in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(real_root)


def kind_of(entry: Entry) -> str:
    """Return the kind of an entry that is no regular file, for a message."""
    if entry.is_symlink():
        return "a link to no file"
    return "a folder" if holds(entry.is_dir) else "a pipe, socket or device"
