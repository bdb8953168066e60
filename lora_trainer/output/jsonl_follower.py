"""Reads a JSON-lines file as it grows: each call yields the lines that are new since the last.

Input: a file that one process appends to and a resume replaces. Output: rows, and whether the file
began anew. The bytes just before the place reached are compared, so that a file which was cut and
has grown past that place again is not taken for the one that was read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_COMPARED_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class News:
    """What a file held beyond what was known: `anew` if all of it has to be forgotten first.

    `rows` are the objects, a None stands for a line that is no object. `torn` says whether a last
    line follows that is not one yet.
    """

    anew: bool
    rows: list[dict[str, Any] | None]
    torn: bool


@dataclass
class JsonlFollower:
    """The place reached in a file; a missing file is an empty one."""

    path: Path
    _offset: int = field(default=0, init=False)
    _before: bytes = field(default=b"", init=False)
    _inode: int = field(default=0, init=False)
    _open_line: bool = field(default=False, init=False)

    def read(self) -> News:
        """Return what is new; raises OSError for a file that is there and cannot be read."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            anew = self._offset > 0
            self._forget()
            return News(anew=anew, rows=[], torn=False)
        with file:
            inode = os.fstat(file.fileno()).st_ino
            data = self._continued(file) if inode == self._inode else None
            anew = data is None
            if data is None:
                self._forget()
                file.seek(0)
                data = file.read()
        self._inode = inode
        return self._taken(data, anew=anew)

    def _continued(self, file: BinaryIO) -> bytes | None:
        """Return the bytes after the place reached; None if what was before it has changed."""
        file.seek(self._offset - len(self._before))
        data = file.read()
        if not data.startswith(self._before):
            return None
        data = data[len(self._before) :]
        # A line that was whole without its end is another one if more was written to it.
        return None if self._open_line and data and not data.startswith(b"\n") else data

    def _taken(self, data: bytes, *, anew: bool) -> News:
        *whole, last = data.split(b"\n")
        rows = [_row(line) for line in whole if line.strip()]
        row = _row(last) if last.strip() else None
        if row is not None:
            rows.append(row)
        taken = data if row is not None else data[: len(data) - len(last)]
        self._offset += len(taken)
        self._before = (self._before + taken)[-_COMPARED_BYTES:]
        self._open_line = row is not None or (self._open_line and not taken)
        return News(anew=anew, rows=rows, torn=row is None and bool(last.strip()))

    def _forget(self) -> None:
        self._offset, self._before, self._open_line = 0, b"", False


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
