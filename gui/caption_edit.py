"""Captions as they are edited: read from where the trainer reads them, and what writing one changes.

Input: a picture as the trainer lists it. An edit goes to where the caption was read from: the
caption file beside the picture or the line of a `metadata.jsonl`; a picture without either gets a
caption file. Mark, line ends and last line break of a file are kept; what was no UTF-8 becomes it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_trainer.data.captions import (
    decoded,
    extension_names,
    read_caption,
    read_metadata_row,
    split_name,
)
from lora_trainer.data.listing import FOLDER_NAME, METADATA_NAME, ListedPicture
from lora_trainer.errors import InputError

from .changes import Change, FileChange, LineChange, find_line, inside, read_content, read_lines

MAX_EDITABLE_BYTES = 65_536
_LINE_END = re.compile("\r\n|\r|\n")
# How the JSON writers in use write a line; an edited one stays in the style it had.
_JSON_STYLES: tuple[Mapping[str, Any], ...] = (
    {"ensure_ascii": False},
    {"ensure_ascii": True},
    {"ensure_ascii": False, "separators": (",", ":")},
    {"ensure_ascii": True, "separators": (",", ":")},
)


@dataclass(frozen=True, kw_only=True)
class Caption:
    """A caption to be edited, with "\\n" line ends; `file` is where an edit goes, relative.

    `stand_in` is what the picture is trained with while `text` is empty, `problem` what had to be
    guessed in reading. Where `locked` says why, it cannot be edited here.
    """

    text: str
    file: str
    place: Literal["file", "line"] = "file"
    stand_in: str = ""
    problem: str = ""
    locked: str = ""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What is around the text of a caption file: mark, line ends, last line break."""

    mark: str = ""
    newline: str = "\n"
    ending: str = ""

    def file_text(self, text: str) -> str:
        body = _LINE_END.sub("\n", text).replace("\n", self.newline)
        return f"{self.mark}{body}{self.ending}"


def caption_of(picture: ListedPicture, *, root: Path, extensions: Sequence[str]) -> Caption:
    """Return the caption that a picture has now; raises InputError when its file cannot be read."""
    folder_name = next((s.text for s in picture.stand_ins if s.source == FOLDER_NAME), "")
    line = next((s for s in picture.stand_ins if s.source != FOLDER_NAME), None)
    data = b"" if picture.sidecar is None else _bytes(picture.sidecar)
    trained = read_caption(data).text
    if line is not None and not trained and (line.text or picture.sidecar is None):
        file = _relative(_metadata_file(picture, line.source, root=root), root)
        return Caption(text=line.text, file=file, place="line", stand_in=folder_name)
    path = picture.sidecar or picture.path.with_name(_new_name(picture, extensions))
    file, stand_in = _relative(path, root), folder_name if line is None else line.text
    if len(data) > MAX_EDITABLE_BYTES:
        locked = f"{file} is {len(data):,} bytes long, too long to be edited here"
        return Caption(text=trained, file=file, locked=locked)
    problem = "; ".join(decoded(data)[1])
    return Caption(text=_parted(data)[0], file=file, stand_in=stand_in, problem=problem)


def caption_change(
    picture: ListedPicture, caption: Caption, text: str, *, root: Path, extensions: Sequence[str]
) -> Change | None:
    """Return what writes `text` as the caption, None when that is what it is; raises InputError."""
    if caption.locked:
        raise InputError(caption.locked, fix="edit the file with a text editor")
    if _LINE_END.sub("\n", text) == caption.text:
        return None
    if caption.place == "line":
        change = _line_change(picture, caption, text, root=root)
        if change is not None:
            return change
    file = caption.file
    if caption.place == "line":  # a caption file takes precedence
        beside = picture.sidecar or picture.path.with_name(_new_name(picture, extensions))
        file = _relative(beside, root)
    before = read_content(inside(root, file))
    data = b"" if before is None else before.encode("utf-8", "surrogateescape")
    layout = _parted(data)[1]
    return FileChange(file=file, before=before, after=layout.file_text(text))


def _line_change(
    picture: ListedPicture, caption: Caption, text: str, *, root: Path
) -> LineChange | None:
    """Return the edited line, None in a file that is not UTF-8: rewriting would change its others."""
    path = inside(root, caption.file)
    content = read_content(path) or ""
    if any("\udc80" <= letter <= "\udcff" for letter in content):
        return None
    own_folder = path.parent != root.resolve()
    name = picture.path.name if own_folder else picture.name
    lines = read_lines(path)
    index = find_line(lines, name)
    if index is None:
        return None
    return LineChange(
        file=caption.file, name=name, before=lines[index], after=_with_text(lines[index], text)
    )


def _with_text(line: str, text: str) -> str:
    """Return a line of a `metadata.jsonl` with another caption, in the style it is written in."""
    mark = "\ufeff" if line.startswith("\ufeff") else ""
    body = line.removeprefix(mark).strip(" \t\r")
    row = read_metadata_row(body)
    style = next(
        (style for style in _JSON_STYLES if json.dumps(dict(row.values), **style) == body),
        _JSON_STYLES[0],
    )
    edited = json.dumps({**row.values, row.key: _LINE_END.sub("\n", text)}, **style)
    return line.replace(body, edited)


def _parted(data: bytes) -> tuple[str, _Layout]:
    """Return the text of a caption file without its last line break, and what is around it."""
    whole = decoded(data)[0]
    ends = _LINE_END.findall(whole)
    newline = max(("\n", "\r\n", "\r"), key=ends.count)
    ending = next((end for end in ("\r\n", "\n", "\r") if whole.endswith(end)), "")
    mark = "\ufeff" if data.startswith(codecs.BOM_UTF8) else ""
    text = _LINE_END.sub("\n", whole[: len(whole) - len(ending)])
    return text, _Layout(mark=mark, newline=newline, ending=ending)


def _metadata_file(picture: ListedPicture, source: str, *, root: Path) -> Path:
    return (root if source == METADATA_NAME else picture.path.parent) / METADATA_NAME


def _new_name(picture: ListedPicture, extensions: Sequence[str]) -> str:
    return split_name(picture.path.name)[0] + extension_names(extensions)[0]


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({error.strerror or error})", fix="make it readable"
        ) from None
