"""Folders and model files of this machine, for the dialog in which one is chosen instead of typed (browse.js).

Inputs: the workplace, whose rule for typed paths holds here too, and a folder that a browser sent. Outputs: the
routes, and plain values for the dialog. What may not be named is not listed. The folder in which something was chosen
is remembered in `.gui/browsed.json`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints
from starlette.routing import Route

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.common.wording import bytes_text
from lora_trainer.dataset.images import IMAGE_EXTENSIONS
from lora_trainer.families.files.hub_files import SUFFIXES

from ..server.pages import Body, answer
from ..server.translation import Words
from ..workplace import Workplace

Kind = Literal["dataset", "base", "models", "export"]
# Entries that one folder shows; a longer list helps nobody to find one.
MAX_ROWS = 2_000
# What makes a folder a model in diffusers' layout.
PIPELINE_FILE = "model_index.json"
_REMEMBERED = "browsed.json"


class Browse(Body):
    """A folder to show, or what was chosen."""

    kind: Kind
    path: Annotated[str, StringConstraints(max_length=4096)]


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the dialog."""

    def look(asked: Browse, _: Words) -> Mapping[str, Any]:
        found = listing(work, asked.kind, asked.path)
        return {**found, "said": _.message(found["said"])}

    def chosen(asked: Browse, _: Words) -> Mapping[str, Any]:
        remember(work, asked.kind, asked.path)
        return {}

    return [answer("/browse/look", Browse, look), answer("/browse/chosen", Browse, chosen)]


def listing(work: Workplace, kind: Kind, text: str) -> dict[str, Any]:
    """Return a folder's subfolders, for a base also its model files, and what choosing the folder means.

    The path of a model file is that file, `chosen`, in its folder.
    An empty text is the folder of the last choice, else the first one that may be named. Raises InputError
    for a path that is not a folder, cannot be read or may not be named.
    """
    folder = work.path(text, what="a folder") if text.strip() else _begin(work, kind)
    chosen = ""
    if folder.is_file() and kind == "base":
        chosen, folder = str(folder) if folder.suffix in SUFFIXES else "", folder.parent
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name.casefold())
    except OSError as error:
        raise InputError(
            f"the folder {folder} cannot be opened: {error.strerror or error}",
            fix="choose another one",
        ) from None
    rows = list(_rows(work, kind, entries))
    above = folder.parent
    return {
        "folder": str(folder),
        "chosen": chosen,
        "above": str(above) if above != folder and work.allows(above) else "",
        "rows": sorted(rows, key=lambda row: row["file"])[:MAX_ROWS],
        "more": max(0, len(rows) - MAX_ROWS),
        **_worth(kind, entries),
    }


def _rows(work: Workplace, kind: Kind, entries: list[os.DirEntry[str]]) -> Iterator[dict[str, Any]]:
    """Yield the folders, and for a base the files, that may be named."""
    for entry in entries:
        # A path is resolved before it is used, so a link counts as the place that it leads to.
        path = Path(os.path.realpath(entry.path))
        if entry.name.startswith(".") or not work.allows(path) or not entry.name.isprintable():
            continue
        try:
            status = path.stat()
        except OSError:  # a link to nothing, a file that has just gone
            continue
        row = {"name": entry.name, "path": str(path)}
        if stat.S_ISDIR(status.st_mode):
            yield {**row, "file": False, "said": ""}
        elif kind == "base" and stat.S_ISREG(status.st_mode) and path.suffix in SUFFIXES:
            yield {**row, "file": True, "said": bytes_text(status.st_size)}


def _worth(kind: Kind, entries: list[os.DirEntry[str]]) -> dict[str, Any]:
    """Return what the folder itself is, and whether it can be chosen."""
    if kind == "base":
        whole = any(entry.name == PIPELINE_FILE for entry in entries)
        return {"said": "A whole model in diffusers' layout" if whole else "", "can": whole}
    if kind in ("models", "export"):
        count = sum(Path(entry.name).suffix in SUFFIXES for entry in entries)
        return {"said": f"{count:,} model files here" if count else "", "can": True}
    images = sum(Path(entry.name).suffix.lower() in IMAGE_EXTENSIONS for entry in entries)
    return {"said": "1 image here" if images == 1 else f"{images:,} images here", "can": True}


def _begin(work: Workplace, kind: Kind) -> Path:
    """Return the folder to open first."""
    roots = [Path.home()] if work.roots is None else [*work.roots, work.runs]
    last = _remembered(work).get(kind)
    candidates = [Path(last), *roots] if isinstance(last, str) and last else roots
    allowed = [path for path in candidates if path.is_dir() and work.allows(path.resolve())]
    if not allowed:
        raise InputError(
            "none of the folders that this server may read is there",
            fix="name one with --datasets at the start",
        )
    return allowed[0]


def remember(work: Workplace, kind: Kind, text: str) -> None:
    """Keep the folder around what was chosen, to begin there next time; raises InputError, MachineError."""
    path = work.path(text, what="a folder")
    work.own.mkdir(parents=True, exist_ok=True)
    known = {**_remembered(work), kind: str(path.parent)}
    write_atomic(work.own / _REMEMBERED, json_bytes(known))


def _remembered(work: Workplace) -> dict[str, Any]:
    try:
        return dict(read_json_object(work.own / _REMEMBERED))
    except RequestError:  # none yet, or of another version: the dialog begins at home
        return {}
