"""Files that are whole or absent: atomic writes, hashing, strict JSON, size-capped folders, memos.

A write goes to a temporary name on the same filesystem and is renamed into place. `durable=True` adds
fsync of the file and its folder, for files that must survive a power cut (FAULTS: without fsync all
acknowledged states were lost). Caches skip fsync and carry checksums instead. Windows' differences are
handled here too: text mode, files held open by other programs, forbidden names.

A memo holds values that can be computed again, in one SQLite file of a cache folder. A table of it has a
name, a version and texts by key. It only saves time: a damaged file counts as an empty one and is made
anew, and values of another version are forgotten.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from filelock import FileLock, Timeout

from lora_trainer.common.errors import LoraTrainError, MachineError, RequestError

TEMPORARY_PREFIX = ".tmp-"
WINDOWS_FORBIDDEN = frozenset('<>:"/\\|?*')
WINDOWS_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
)
"""Names that open a device in any folder and with any extension (Microsoft, "Naming Files")."""
_WINDOWS_PATH_CHARACTERS = 260
_HELD_OPEN_S = 2.0
_CHUNK_BYTES = 1 << 20
T = TypeVar("T")
Part = bytes | memoryview
Data = Part | Sequence[Part]
"""The bytes of a file, or consecutive parts, which are never joined in memory."""


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` so that `path` always holds either its whole old or its whole new content.

    Raises MachineError naming the path and the free bytes on a disk error.
    """
    # A name has at most 255 bytes: about 30 of the ASCII prefix and 50 characters of up to four bytes.
    temporary = path.with_name(
        f"{TEMPORARY_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{path.name}"[:80]
    )
    try:
        write_file(temporary, data, durable=durable)
        retry_while_open(lambda: temporary.replace(path))
        if durable:
            sync_folder(path.parent)  # the file's own fsync does not store its new name
    except OSError as error:
        with suppress(OSError):  # report the first disk error, not a second one on cleaning up
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def write_file(path: Path, data: Data, *, durable: bool) -> None:
    """Create `path` with mode 0666 & ~umask, write all bytes, optionally fsync; raises OSError."""
    descriptor = open_binary(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for part in parts_of(data):
            view = memoryview(part)
            while view:  # os.write may write less than it is given
                view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_binary(path: Path, flags: int, *, mode: int = 0o666) -> int:
    """Open a file in binary mode and return its descriptor (`os.open`); raises OSError.

    Without `O_BINARY`, which only Windows has, its C runtime writes "\\r\\n" for each "\\n" byte of a
    tensor and stops reading at the first Ctrl-Z.
    """
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def retry_while_open(operation: Callable[[], T]) -> T:
    """Rename, remove or read a file; on Windows retry for 2 s while another program has it open.

    On Windows a file that a virus scanner, an indexer or the GUI has open cannot be replaced or removed,
    nor read while it is being replaced. Elsewhere a PermissionError is final and raised at once.
    """
    deadline_s, wait_s = time.monotonic() + _HELD_OPEN_S, 0.005
    while True:
        try:
            return operation()
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline_s:
                raise
        time.sleep(wait_s)
        wait_s = min(0.1, 2 * wait_s)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable; Windows has no such call and needs none."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> MachineError:
    """Return a MachineError of one line with the path and the free bytes for a disk's OSError."""
    fix = "free some space or choose another folder with --output or --set data.cache_dir=FOLDER"
    if sys.platform == "win32" and isinstance(error, PermissionError):
        fix = "close the program that has the file open, or choose another folder with --output"
    elif sys.platform == "win32" and len(str(path.absolute())) >= _WINDOWS_PATH_CHARACTERS - 12:
        fix = "its path is too long for Windows: enable long paths, or choose a shorter --output"
    return MachineError(
        f"cannot write {path}: {error.strerror or error} ({_free_text(path)})", fix=fix
    )


def windows_name_problem(name: str) -> str:
    """Return why Windows does not allow a file name, as a predicate; "" for an allowed name."""
    if forbidden := WINDOWS_FORBIDDEN & set(name):
        return f"holds {' '.join(sorted(forbidden))}, which Windows forbids in names"
    if name.partition(".")[0].rstrip().casefold() in WINDOWS_DEVICES:
        return "is the name of a device on Windows"
    if name != name.rstrip(". "):
        return "ends in a dot or a space, which Windows removes"
    return ""


@contextmanager
def locked(file: Path, *, within_s: float, busy: LoraTrainError) -> Iterator[None]:
    """Hold the lock `file` while the block runs, creating its folder; the lock does not nest.

    Raises `busy` when another process holds it for `within_s` seconds, MachineError on a disk error.
    """
    lock = FileLock(file, timeout=within_s)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise busy from None
    except OSError as error:
        raise disk_error(file, error) from error
    try:
        yield
    finally:
        lock.release()


def _free_text(path: Path) -> str:
    existing = next((parent for parent in path.parents if parent.exists()), Path())
    return f"{shutil.disk_usage(existing).free:,} bytes free"


def parts_of(data: Data) -> Sequence[Part]:
    """Return the parts of a file, one for plain bytes."""
    return (data,) if isinstance(data, bytes | memoryview) else data


def sha256_bytes(data: Data) -> str:
    """Return the hex SHA-256 of `data`."""
    digest = hashlib.sha256()
    for part in parts_of(data):
        digest.update(part)
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any) -> bytes:
    """Encode as readable UTF-8 JSON with a final newline; NaN and infinity are refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises RequestError with line and column, or the duplicate key."""
    try:
        text = retry_while_open(lambda: path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read {path}: {error}", fix="give a readable UTF-8 JSON file"
        ) from None
    return json_object(text, name=str(path))


def json_object(text: str, *, name: str) -> dict[str, Any]:
    """Parse a JSON object; raises RequestError with `name`, line and column, or the duplicate key."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise RequestError(f"{where}: not JSON: {error.msg}", fix="correct that line") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: {error}", fix="correct the file") from None
    if not isinstance(value, dict):
        raise RequestError(f"{name} holds a {type(value).__name__}", fix="give a JSON object {...}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def user_cache_folder() -> Path:
    """Return the folder for our caches where the platform keeps those of programs."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))
        return Path(local) / "lora-train" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "lora-train"


@dataclass(frozen=True, kw_only=True)
class CappedFolder:
    """A folder of disposable files kept under `limit_bytes` by removing the least recently used.

    Files are removed only in a folder with our marker file, never in a folder given by mistake.
    """

    root: Path
    limit_bytes: int
    marker: str = ".lora-train-cache"

    def create(self) -> None:
        """Create the folder and its marker; raises MachineError on a disk error."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not (self.root / self.marker).exists():
                write_file(
                    self.root / self.marker, b"lora-train may delete files here\n", durable=False
                )
        except OSError as error:
            raise disk_error(self.root, error) from error

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield each entry file with its stat, without hidden and temporary files."""
        return ((Path(file), stat) for file, stat in _files_in(str(self.root)))

    def used_bytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(stat.st_size for _, stat in _files_in(str(self.root)))

    def prune(self, keep: Iterable[Path | str]) -> int:
        """Remove oldest-used files until under the limit, never one in `keep`; return bytes freed."""
        if not (self.root / self.marker).exists():
            return 0
        excess = self.used_bytes() - self.limit_bytes
        if excess <= 0:
            return 0
        protected = {os.path.normpath(path) for path in keep}
        entries = sorted(
            # Mounts with noatime never update the time of reading, so the later of both times counts.
            (max(stat.st_atime_ns, stat.st_mtime_ns), file, stat.st_size)
            for file, stat in _files_in(str(self.root))
        )
        freed = 0
        for _, file, size_bytes in entries:
            if freed >= excess:
                break
            if os.path.normpath(file) not in protected:
                with suppress(PermissionError):  # Windows: another run reads it
                    Path(file).unlink(missing_ok=True)
                    freed += size_bytes
        return freed


def _files_in(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield regular files of a folder and its subfolders whose names do not start with a dot."""
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
    except OSError:  # another run removed the folder, or its permissions forbid reading
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_in(entry.path)
            continue
        try:
            if entry.is_file():
                yield entry.path, entry.stat()
        except OSError:  # another run pruned it between listing and stat
            continue


# ---- the memo of a cache folder

MEMO_FILE = ".memo.sqlite"
_BUSY_S = 10.0
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
    changes: dict[str, str] = field(default_factory=dict)
    """Entries that the file does not hold yet."""

    @classmethod
    def load(cls, folder: Path | None, name: str, *, version: str = "1") -> MemoTable:
        """Read a table; one that is not there, damaged or of another version is empty. Never raises."""
        table = cls(name=name, version=version, folder=folder)
        if folder is None or not (folder / MEMO_FILE).is_file():
            return table
        query = "SELECT key, value, checksum FROM memo WHERE name = ? AND version = ?"
        # SQLite notices damaged pages, not damaged bytes of a value, nor a value of another type.
        with suppress(sqlite3.Error, OSError, TypeError):
            with _memo_opened(folder / MEMO_FILE) as database:
                rows = database.execute(query, (name, version)).fetchall()
            table.entries = {
                _text(key): _text(value)
                for key, value, checksum in rows
                if crc32(value, crc32(key)) == checksum
            }
        return table

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
        with suppress(sqlite3.Error), _memo_opened(self.folder / MEMO_FILE) as database, database:
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
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode in _NOT_LOCKED:
                    return
                raise
            except sqlite3.DatabaseError:  # no database, or its pages are damaged
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
        with _memo_opened(file) as database, database:
            database.execute(_LAYOUT)
            others = "DELETE FROM memo WHERE name = ? AND version <> ?"
            database.execute(others, (self.name, self.version))
            database.executemany("INSERT OR REPLACE INTO memo VALUES (?, ?, ?, ?, ?)", rows)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may hold bytes that are not UTF-8


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, kw_only=True)
class HashMemo:
    """Content hashes remembered by (size, mtime_ns, ctime_ns, inode), so that a warm start reads no file."""

    table: MemoTable = field(default_factory=lambda: MemoTable(name="hashes"))
    """By path: "size mtime ctime inode hash"; lists instead of texts would take twice the memory."""

    @classmethod
    def load(cls, folder: Path | None) -> HashMemo:
        """Read the hashes of a cache folder; never raises."""
        return cls(table=MemoTable.load(folder, "hashes"))

    def sha256(self, path: Path) -> str:
        """Return the hex SHA-256 of a file, remembered if its stat is unchanged; raises OSError."""
        key, stat = _path_key(path), os.stat(path)  # noqa: PTH116 - asked for each of 100,000 files
        remembered = self._remembered(key, stat)
        if remembered is not None:
            return remembered
        digest = sha256_file(path)
        # A file changed less than 2 s ago may change again within its timestamp's resolution.
        if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            self.table.put(key, _stamp(stat) + digest)
        return digest

    def known(self, path: str) -> str | None:
        """Return the remembered hash of a file with unchanged stat, None for a file that must be read."""
        try:
            return self._remembered(_path_key(path), os.stat(path))  # noqa: PTH116 - as above
        except OSError:
            return None

    def save(self) -> None:
        """Write the hashes; raises MachineError on a disk error."""
        self.table.save()

    def _remembered(self, key: str, stat: os.stat_result) -> str | None:
        stamp, entry = _stamp(stat), self.table.get(key)
        if entry is not None and entry.startswith(stamp):
            return entry.removeprefix(stamp)
        return None


def _path_key(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - resolve() would stat every parent of every file


def _stamp(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino} "


def memo_is_damaged(folder: Path) -> bool:
    """Whether the memo of a cache folder is there and cannot be read."""
    file = folder / MEMO_FILE
    if not file.is_file():
        return False
    with suppress(sqlite3.Error), _memo_opened(file) as database:
        return bool(database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    return True


@contextmanager
def _memo_opened(file: Path) -> Iterator[sqlite3.Connection]:
    # Opened for each use: an open file could not be removed on Windows, nor used after a fork.
    with closing(sqlite3.connect(file, timeout=_BUSY_S)) as database:
        # No fsync: a power cut costs a memo, and 100,000 images are checked again.
        database.execute("PRAGMA synchronous = OFF")
        yield database
