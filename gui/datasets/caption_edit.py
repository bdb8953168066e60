"""Captions as they are edited: read from where the trainer reads them, and what writing one changes.

Input: a picture as the trainer lists it. An edit goes to where the caption was read from: the
caption file beside the picture or the line of a `metadata.jsonl`; a picture without either gets a
caption file. Mark, line ends and last line break of a file are kept; what was not UTF-8 becomes it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lora_trainer.common.errors import InputError
from lora_trainer.dataset.captions import (
    FOLDER_NAME,
    METADATA_NAME,
    decoded,
    extension_names,
    is_json,
    read_caption_file,
    read_metadata_row,
    split_name,
)
from lora_trainer.dataset.listing import ImageFile

from .changes import (
    Change,
    FileChange,
    LinesChange,
    Row,
    find_lines,
    inside,
    read_content,
    read_lines,
)

MAX_EDITABLE_BYTES = 65_536
_LINE_END = re.compile("\r\n|\r|\n")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
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
        body = _plain(text).replace("\n", self.newline)
        return f"{self.mark}{body}{self.ending}"


def caption_of(picture: ImageFile, *, root: Path, extensions: Sequence[str]) -> Caption:
    """Return the caption that a picture has now; raises InputError when its file cannot be read."""
    folder_name = next((s.text for s in picture.stand_ins if s.source == FOLDER_NAME), "")
    line = next((s for s in picture.stand_ins if not s.of_name), None)
    data = b"" if picture.sidecar is None else _bytes(picture.sidecar)
    trained = read_caption_file(picture.sidecar_file or "", data).text
    is_locked_json = picture.sidecar is not None and is_json(picture.sidecar.name)
    if is_locked_json and trained and picture.sidecar is not None:
        file = _relative(picture.sidecar, root)
        return Caption(text=trained, file=file, locked=f"{file} holds more than the caption")
    if line is not None and not trained and PurePosixPath(line.source).name != METADATA_NAME:
        locked = f"{line.source} holds its caption in a table"
        return Caption(text=line.text, file=line.source, locked=locked)
    if line is not None and not trained and (line.text or picture.sidecar is None):
        file = line.source
        locked = f"{file} gives {len(line.lines)} captions for it in a list" if line.lines else ""
        return Caption(text=line.text, file=file, place="line", stand_in=folder_name, locked=locked)
    path = None if is_locked_json else picture.sidecar
    path = path or _new_sidecar(picture, extensions)
    data = b"" if is_locked_json else data
    file, stand_in = _relative(path, root), folder_name if line is None else line.text
    if len(data) > MAX_EDITABLE_BYTES:
        locked = f"{file} is {len(data):,} bytes long, too long to be edited here"
        return Caption(text=trained, file=file, locked=locked)
    problem = "; ".join(decoded(data)[1])
    return Caption(text=_parted(data)[0], file=file, stand_in=stand_in, problem=problem)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A picture, the caption that it has, and the one it shall have."""

    picture: ImageFile
    caption: Caption
    text: str

    @property
    def changes_it(self) -> bool:
        """Whether there is anything to write."""
        return _plain(self.text) != self.caption.text


def caption_changes(
    edits: Iterable[Edit], *, root: Path, extensions: Sequence[str]
) -> list[Change]:
    """Return what writes the captions, one change for each file; raises InputError.

    Of several pictures that share a caption file the first one counts.
    """
    lines: dict[str, list[Edit]] = {}
    files: dict[str, Edit] = {}
    for edit in edits:
        if edit.caption.locked:
            raise InputError(edit.caption.locked, fix="edit the file with a text editor")
        if edit.changes_it and edit.caption.place == "line":
            lines.setdefault(edit.caption.file, []).append(edit)
        elif edit.changes_it:
            files.setdefault(edit.caption.file, edit)
    changes: list[Change] = []
    for file, described in lines.items():
        rows, others = _rows(file, described, root=root)
        changes += [LinesChange(file=file, rows=rows)] if rows else []
        for edit in others:  # a caption file beside the picture takes precedence
            beside = edit.picture.sidecar or _new_sidecar(edit.picture, extensions)
            files.setdefault(_relative(beside, root), edit)
    return changes + [_file_change(file, edit.text, root=root) for file, edit in files.items()]


def _file_change(file: str, text: str, *, root: Path) -> FileChange:
    before = read_content(inside(root, file))
    data = b"" if before is None else before.encode("utf-8", "surrogateescape")
    return FileChange(file=file, before=before, after=_parted(data)[1].file_text(text))


def _rows(
    file: str, edits: Sequence[Edit], *, root: Path
) -> tuple[tuple[Row, ...], Sequence[Edit]]:
    """Return the edited lines of a `metadata.jsonl`, and the edits that cannot be made there."""
    path = inside(root, file)
    lines = read_lines(path)
    if any(_NOT_UTF8.search(line) for line in lines):  # rewriting would change the others too
        return (), edits
    prefix = file.removesuffix(METADATA_NAME)
    names = [edit.picture.name.removeprefix(prefix) for edit in edits]
    places = find_lines(lines, names)
    rows = {
        name: Row(
            name=name,
            before=lines[places[name]],
            after=_with_text(lines[places[name]], edit.text),
        )
        for name, edit in zip(names, edits, strict=True)
        if name in places
    }
    others = [edit for name, edit in zip(names, edits, strict=True) if name not in rows]
    return tuple(rows.values()), others


def _with_text(line: str, text: str) -> str:
    """Return a line of a `metadata.jsonl` with another caption, in the style it is written in."""
    mark = "\ufeff" if line.startswith("\ufeff") else ""
    body = line.removeprefix(mark).strip(" \t\r")
    values, _, key = read_metadata_row(body)
    style = next(
        (style for style in _JSON_STYLES if json.dumps(values, **style) == body),
        _JSON_STYLES[0],
    )
    edited = json.dumps({**values, key: _plain(text)}, **style)
    return line.replace(body, edited)


def _parted(data: bytes) -> tuple[str, _Layout]:
    """Return the text of a caption file without its last line break, and what is around it."""
    whole = decoded(data)[0]
    ends = _LINE_END.findall(whole)
    newline = max(("\n", "\r\n", "\r"), key=ends.count)
    ending = next((end for end in ("\r\n", "\n", "\r") if whole.endswith(end)), "")
    mark = "\ufeff" if data.startswith(codecs.BOM_UTF8) else ""
    text = _plain(whole[: len(whole) - len(ending)])
    return text, _Layout(mark=mark, newline=newline, ending=ending)


def _new_sidecar(picture: ImageFile, extensions: Sequence[str]) -> Path:
    stem = split_name(picture.path.name)[0]
    return picture.path.with_name(stem + extension_names(extensions)[0])


def _plain(text: str) -> str:
    return _LINE_END.sub("\n", text)


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
