"""Values that can be computed again, remembered in one SQLite file of a cache folder.

A table has a name, a version and texts by key. Everything here only saves time: a damaged file counts as
an empty one and is made anew, and values of another version are forgotten.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from lora_trainer.common.files import disk_error, sha256_file

MEMO_FILE = ".memo.sqlite"
_BUSY_S = 10.0
_ROWS_AT_ONCE = 5000
_NOT_LOCKED = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR_LOCK,  # some network file systems have no locks
        sqlite3.SQLITE_IOERR_RDLOCK,
        sqlite3.SQLITE_IOERR_UNLOCK,
        sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
    }
)
_LAYOUT = """
CREATE TABLE IF NOT EXISTS memo (
    name TEXT, version TEXT, key BLOB, value BLOB, checksum INTEGER, PRIMARY KEY (name, key)
) WITHOUT ROWID
"""


@dataclass(kw_only=True)
class MemoTable:
    """One table of the memo in `folder`, held in memory and written by `save`; `folder` None: never.

    SQLite locks the file, so several processes may save; the last value of a key stays.
    """

    name: str
    version: str = "1"
    folder: Path | None = None
    entries: dict[str, str] = field(default_factory=dict)
    # Entries that the file does not hold yet.
    changes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path | None, name: str, version: str = "1") -> MemoTable:
        """Read a table; a missing table, or a table of another version, is empty. Never raises."""
        entries = {} if folder is None else dict(rows(folder, name, version))
        return cls(name=name, version=version, folder=folder, entries=entries)

    def get(self, key: str) -> str | None:
        """Return the value of a key, None for one that must be computed."""
        return self.entries.get(key)

    def put(self, key: str, value: str) -> None:
        """Remember a value; `save` writes it."""
        self.entries[key] = self.changes[key] = value

    def retain(self, keys: Container[str]) -> None:
        """Forget all other keys, also in the file, unless that cannot be written. Never raises."""
        others = [key for key in self.entries if key not in keys]
        for key in others:
            del self.entries[key]
            self.changes.pop(key, None)
        if self.folder is None or not others:
            return
        rows = ((self.name, _bytes(key)) for key in others)
        damages = (sqlite3.Error, UnicodeDecodeError)
        with suppress(*damages), _open(self.folder / MEMO_FILE) as database, database:
            database.executemany("DELETE FROM memo WHERE name = ? AND key = ?", rows)

    def save(self) -> None:
        """Write the changed rows; raises MachineError on a disk error.

        Neither a damaged file nor one that cannot be locked is an error: the first is made anew, with the
        second the values are computed once more at the next start.
        """
        if self.folder is None or not self.changes:
            return
        file = self.folder / MEMO_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._write(file)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                # No database, damaged pages, or a damaged layout, whose text SQLite's message may hold.
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                if code in _NOT_LOCKED:
                    return
                if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
                    raise
                file.unlink()
                self.changes = dict(self.entries)
                self._write(file)
        except (OSError, sqlite3.Error) as error:
            reason = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
            raise disk_error(file, reason) from error
        self.changes = {}

    def _write(self, file: Path) -> None:
        pairs = [(_bytes(key), _bytes(value)) for key, value in self.changes.items()]
        rows = (
            (self.name, self.version, key, value, crc32(value, crc32(key))) for key, value in pairs
        )
        with _open(file) as database, database:
            database.execute(_LAYOUT)
            others = "DELETE FROM memo WHERE name = ? AND version <> ?"
            database.execute(others, (self.name, self.version))
            database.executemany("INSERT OR REPLACE INTO memo VALUES (?, ?, ?, ?, ?)", rows)


def rows(folder: Path, name: str, version: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a table with its value; they end where the file is damaged or stays locked. Never raises.

    They come some at a time: all of 200,000 would take 50 MiB, and one query would keep other processes from saving.
    With a damaged key some may come twice.
    """
    query = (
        "SELECT key, value, checksum FROM memo WHERE name = ? AND version = ? AND key > ?"
        f" ORDER BY key LIMIT {_ROWS_AT_ONCE}"
    )
    # SQLite notices damaged pages, not damaged bytes of a value, nor a value of another type.
    damages = (sqlite3.Error, OSError, TypeError, UnicodeDecodeError)
    if not (folder / MEMO_FILE).is_file():
        return
    last_key = b""
    with suppress(*damages), _open(folder / MEMO_FILE) as database:
        while batch := database.execute(query, (name, version, last_key)).fetchall():
            for key, value, checksum in batch:
                if crc32(value, crc32(key)) == checksum:
                    yield _text(key), _text(value)
            if batch[-1][0] <= last_key:  # a damaged key: it would begin again and again
                return
            last_key = batch[-1][0]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may hold bytes that are not UTF-8


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class HashMemo:
    """Content hashes remembered by (size, mtime_ns, ctime_ns, inode), so that a warm start reads no file.

    They are those of a cache folder, or of this process alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # By path: "size mtime ctime inode hash"; lists instead of texts would take twice the memory.
        self.table = MemoTable.load(folder, "hashes")

    def sha256(self, path: Path | str) -> str:
        """Return the hex SHA-256 of a file, remembered if its stat is unchanged; raises OSError.

        Text is quicker: a `Path` for each of 200,000 files takes a second.
        """
        # resolve() would stat every parent of every one of 100,000 files
        key, stat = os.path.abspath(path), os.stat(path)  # noqa: PTH100, PTH116
        stamp = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino} "
        entry = self.table.get(key)
        if entry is not None and entry.startswith(stamp):
            return entry.removeprefix(stamp)
        digest = sha256_file(Path(path))
        # A file changed less than 2 s ago may change again within its timestamp's resolution.
        if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            self.table.put(key, stamp + digest)
        return digest


@contextmanager
def _open(file: Path) -> Iterator[sqlite3.Connection]:
    # Opened for each use: an open file could not be removed on Windows, nor used after a fork.
    with closing(sqlite3.connect(file, timeout=_BUSY_S)) as database:
        # No fsync: a power cut costs a memo, and 100,000 images are checked again.
        database.execute("PRAGMA synchronous = OFF")
        yield database
