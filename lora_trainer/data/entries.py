"""Directory entries: those that somebody meant, their names as text, what they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lora_trainer.data.captions import split_name
from lora_trainer.data.findings import shown
from lora_trainer.data.images import IMAGE_EXTENSIONS
from lora_trainer.errors import InputError

Entry = os.DirEntry[str]
_IGNORED_NAMES = frozenset({"__macosx", "thumbs.db", "desktop.ini"})
_DOCUMENT_STEMS = frozenset({"readme", "license", "licence"})


def entries_in(path: Path) -> list[Entry]:
    """Return what lies in a folder by name, system files and documents excepted; raises InputError."""
    try:
        with os.scandir(path) as found:
            return sorted(
                (entry for entry in found if _is_meant(entry.name)), key=lambda entry: entry.name
            )
    except OSError as error:
        what = f"cannot read folder {shown(str(path))} ({error.strerror or error})"
        raise InputError(what, fix="make it readable or move it away") from None


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
    """Return what an entry is that is no regular file."""
    if entry.is_symlink():
        return "a link to no file"
    return "a folder" if holds(entry.is_dir) else "a pipe, socket or device"
