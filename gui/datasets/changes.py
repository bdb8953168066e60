"""What an edit does to a dataset folder, so that it can be checked before, done, and undone exactly.

A `FileChange` replaces the whole content of a caption file, a `LinesChange` lines of a
`metadata.jsonl`, a `MoveChange` gives a file another name. Each knows both of its states; nothing is
written where the folder is in neither. `durable`: a written file survives a power cut from then on.
File names are relative to the dataset folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from lora_trainer.common.errors import InputError
from lora_trainer.common.files import disk_error, retry_while_open, write_atomic
from lora_trainer.dataset.captions import read_metadata_row, same_name
from lora_trainer.dataset.listing import EXCLUDED_FOLDER

# What a file holds, bytes that are not UTF-8 as lone surrogates; None: there is no such file.
Content = str | None
Side = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """The whole content of one file."""

    file: str
    before: Content
    after: Content

    def is_at(self, root: Path, side: Side) -> bool:
        """Whether the folder is as it is before or after the change; raises InputError."""
        content = self.before if side == "before" else self.after
        return read_content(inside(root, self.file)) == content

    def bring(self, root: Path, side: Side, *, durable: bool = True) -> None:
        """Write that side; raises InputError or MachineError."""
        content = self.before if side == "before" else self.after
        _write_content(inside(root, self.file), content, durable=durable)

    def then(self, later: Change) -> Change | None:
        """Return both as one change, None where the later one does not go on from here."""
        if not isinstance(later, FileChange) or self.file != later.file:
            return None
        return replace(later, before=self.before) if self.after == later.before else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a `metadata.jsonl`; `name` is the picture's as the file gives it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class LinesChange:
    """Lines of one `metadata.jsonl`, every other byte of it kept."""

    file: str
    rows: tuple[Row, ...]

    def is_at(self, root: Path, side: Side) -> bool:
        """Whether the lines about these pictures are those; raises InputError."""
        lines = read_lines(inside(root, self.file))
        places = find_lines(lines, [row.name for row in self.rows])
        return all(
            row.name in places and lines[places[row.name]] == getattr(row, side)
            for row in self.rows
        )

    def bring(self, root: Path, side: Side, *, durable: bool = True) -> None:
        """Write those lines; raises InputError or MachineError."""
        path = inside(root, self.file)
        lines = read_lines(path)
        places = find_lines(lines, [row.name for row in self.rows])
        for row in self.rows:
            lines[places[row.name]] = getattr(row, side)
        _write_content(path, "\n".join(lines), durable=durable)

    def then(self, later: Change) -> Change | None:
        """Return both as one change of one line, None where they are not that."""
        if not isinstance(later, LinesChange) or self.file != later.file:
            return None
        pair = (*self.rows, *later.rows)
        if len(pair) != 2 or (pair[0].name, pair[0].after) != (pair[1].name, pair[1].before):
            return None
        return replace(later, rows=(replace(pair[1], before=pair[0].before),))


@dataclass(frozen=True, kw_only=True)
class MoveChange:
    """A file that gets another name."""

    file: str
    to: str

    def is_at(self, root: Path, side: Side) -> bool:
        """Whether the file has that name, and nothing the other; raises InputError."""
        source, target = self._paths(root, side)
        return source.is_file() and not os.path.lexists(target)

    def bring(self, root: Path, side: Side, *, durable: bool = True) -> None:
        """Give the file that name; raises InputError or MachineError."""
        target, source = self._paths(root, side)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            retry_while_open(lambda: source.rename(target))
        except OSError as error:
            raise disk_error(target, error) from error
        _remove_emptied(source.parent, root=root)

    def then(self, later: Change) -> Change | None:
        """Return None: each move is a step of its own."""
        return None

    def _paths(self, root: Path, side: Side) -> tuple[Path, Path]:
        names = (self.file, self.to) if side == "before" else (self.to, self.file)
        return inside(root, names[0]), inside(root, names[1])


Change = FileChange | LinesChange | MoveChange


def to_json(change: Change) -> dict[str, Any]:
    """Return plain values, which `from_json` reads back."""
    return asdict(change)


def from_json(values: Mapping[str, Any]) -> Change:
    """Rebuild a change; raises ValueError for anything else."""
    match values:
        case {"file": str(file), "rows": [*rows]}:
            return LinesChange(file=file, rows=tuple(_row(row) for row in rows))
        case {"file": str(file), "to": str(to)}:
            return MoveChange(file=file, to=to)
        case {"file": str(file), "before": str() | None as before, "after": str() | None as after}:
            return FileChange(file=file, before=before, after=after)
    raise ValueError("no change")


def _row(values: Any) -> Row:
    match values:
        case {"name": str(name), "before": str(before), "after": str(after)}:
            return Row(name=name, before=before, after=after)
    raise ValueError("no line of a change")


def inside(root: Path, name: str) -> Path:
    """Return the path of a file of the dataset, links resolved; raises InputError for any other."""
    path = root / name
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
        raise InputError(f"{name!r} is not a file of the dataset", fix="choose one of its files")
    # The folder's links are resolved, not the file's: a move moves a link, not what it leads to.
    found = path.parent.resolve() / path.name
    real = found.resolve() if found.is_symlink() else found
    if not real.is_relative_to(root.resolve()):
        raise InputError(
            f"{name} leads out of the dataset folder, and nothing is changed there",
            fix="open the folder that it really lies in",
        )
    return found


def read_content(path: Path) -> Content:
    """Return what a file holds, None when there is none; raises InputError."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({error.strerror or error})", fix="make it readable"
        ) from None


def find_lines(lines: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """Return which line describes each picture for the trainer: the last of its name, else alike."""
    exact: dict[str, int] = {}
    alike: dict[str, int] = {}
    for index, line in enumerate(lines):
        try:
            _, found, _ = read_metadata_row(line.removeprefix("\ufeff"))
        except ValueError:
            continue
        exact[found] = index
        alike[same_name(found)] = index
    places = {name: exact.get(name, alike.get(same_name(name))) for name in names}
    return {name: index for name, index in places.items() if index is not None}


def read_lines(path: Path) -> list[str]:
    """Return the lines of a `metadata.jsonl`, with the "\\r" of their ends; raises InputError."""
    return (read_content(path) or "").split("\n")


def _write_content(path: Path, content: Content, *, durable: bool) -> None:
    real = path.resolve()
    try:
        if content is None:
            retry_while_open(real.unlink)
            return
        mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else None
    except OSError as error:
        raise disk_error(path, error) from error
    write_atomic(real, content.encode("utf-8", "surrogateescape"), durable=durable)
    if mode is not None:
        with suppress(OSError):  # a filesystem without modes
            real.chmod(mode)


def _remove_emptied(folder: Path, *, root: Path) -> None:
    """Remove what this interface made for excluded pictures, once nothing is left in it."""
    top = root.resolve() / EXCLUDED_FOLDER
    while folder.is_relative_to(top):
        try:
            folder.rmdir()
        except OSError:  # something is left
            return
        folder = folder.parent
