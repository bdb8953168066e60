"""What an edit does to a dataset folder, so that it can be checked before, done, and undone exactly.

A `FileChange` replaces the whole content of a caption file, a `LineChange` one line of a
`metadata.jsonl`, a `MoveChange` gives a file another name. Each knows both of its states; nothing is
written where the folder is in neither. File names are relative to the dataset folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from lora_trainer.data.captions import read_metadata_row, same_name
from lora_trainer.data.listing import EXCLUDED_FOLDER
from lora_trainer.errors import InputError
from lora_trainer.files import disk_error, write_atomic

Content = str | None
"""What a file holds, bytes that are no UTF-8 as lone surrogates; None: there is no such file."""
Side = Literal["before", "after"]
SIDES: tuple[Side, ...] = get_args(Side)


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

    def bring(self, root: Path, side: Side) -> None:
        """Write that side; raises InputError or MachineError."""
        content = self.before if side == "before" else self.after
        _write_content(inside(root, self.file), content)


@dataclass(frozen=True, kw_only=True)
class LineChange:
    """The line of a `metadata.jsonl` that describes `name`, as that file names it."""

    file: str
    name: str
    before: str
    after: str

    def is_at(self, root: Path, side: Side) -> bool:
        """Whether the last line about this picture is that one; raises InputError."""
        lines = read_lines(inside(root, self.file))
        index = find_line(lines, self.name)
        return index is not None and lines[index] == getattr(self, side)

    def bring(self, root: Path, side: Side) -> None:
        """Write that line, every other byte of the file kept; raises InputError or MachineError."""
        path = inside(root, self.file)
        lines = read_lines(path)
        index = find_line(lines, self.name)
        if index is None:
            raise _changed_elsewhere(self.file)
        lines[index] = getattr(self, side)
        _write_content(path, "\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class MoveChange:
    """A file that gets another name."""

    file: str
    to: str

    def is_at(self, root: Path, side: Side) -> bool:
        """Whether the file has that name, and nothing the other; raises InputError."""
        source, target = self._paths(root, side)
        return source.is_file() and not os.path.lexists(target)

    def bring(self, root: Path, side: Side) -> None:
        """Give the file that name; raises InputError or MachineError."""
        target, source = self._paths(root, side)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
        except OSError as error:
            raise disk_error(target, error) from error
        _remove_emptied(source.parent, root=root)

    def _paths(self, root: Path, side: Side) -> tuple[Path, Path]:
        names = (self.file, self.to) if side == "before" else (self.to, self.file)
        return inside(root, names[0]), inside(root, names[1])


Change = FileChange | LineChange | MoveChange
_KINDS: Mapping[str, type[Change]] = {"file": FileChange, "line": LineChange, "move": MoveChange}


def to_json(change: Change) -> dict[str, Any]:
    """Return plain values, which `from_json` reads back."""
    kind = next(name for name, found in _KINDS.items() if isinstance(change, found))
    return {"kind": kind, **asdict(change)}


def from_json(values: Mapping[str, Any]) -> Change:
    """Rebuild a change; raises ValueError for anything else."""
    rest = {name: value for name, value in values.items() if name != "kind"}
    try:
        change = _KINDS[values["kind"]](**rest)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no change: {error}") from None
    if not all(value is None or isinstance(value, str) for value in rest.values()):
        raise ValueError("a value of the wrong kind")
    return change


def inside(root: Path, name: str) -> Path:
    """Return the path of a file of the dataset, links resolved; raises InputError for any other."""
    path = root / name
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
        raise InputError(f"{name!r} is no file of the dataset", fix="choose one of its files")
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


def find_line(lines: list[str], name: str) -> int | None:
    """Return which line describes a picture for the trainer: the last of its exact name, else alike."""
    exact: int | None = None
    alike: int | None = None
    for index, line in enumerate(lines):
        try:
            found = read_metadata_row(line.removeprefix("\ufeff")).name
        except ValueError:
            continue
        if found == name:
            exact = index
        elif same_name(found) == same_name(name):
            alike = index
    return alike if exact is None else exact


def read_lines(path: Path) -> list[str]:
    """Return the lines of a `metadata.jsonl`, with the "\\r" of their ends; raises InputError."""
    return (read_content(path) or "").split("\n")


def _write_content(path: Path, content: Content) -> None:
    real = path.resolve()
    try:
        if content is None:
            real.unlink()
            return
        mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else None
    except OSError as error:
        raise disk_error(path, error) from error
    write_atomic(real, content.encode("utf-8", "surrogateescape"))
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


def _changed_elsewhere(name: str) -> InputError:
    return InputError(f"{name} was changed by something else", fix="load the page again")
