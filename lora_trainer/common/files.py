"""Files that are whole or absent: atomic writes, hashing, strict JSON, size-capped folders.

A write goes to a temporary name on the same filesystem and is renamed into place. `durable=True` adds
fsync of the file and its folder, for files that must survive a power cut: without it a cut can lose
every state that was reported as saved. Caches skip fsync and carry checksums instead. Windows' differences are
handled here too: text mode, files held open by other programs, forbidden names.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, TypeVar, cast

from filelock import FileLock, Timeout

from lora_trainer.common.errors import LoraTrainError, MachineError, RequestError

TEMPORARY_PREFIX = ".tmp-"
WINDOWS_FORBIDDEN = frozenset('<>:"/\\|?*')
# Names that open a device in any folder and with any extension (Microsoft, "Naming Files").
WINDOWS_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
)
_WINDOWS_PATH_CHARACTERS = 260
_HELD_OPEN_S = 2.0
_CHUNK_BYTES = 1 << 20
T = TypeVar("T")
Part = bytes | memoryview
# The bytes of a file, or consecutive parts, which are never joined in memory.
Data = Part | Sequence[Part]


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` so that `path` always holds either its whole old or its whole new content.

    Raises MachineError naming the path and the free bytes on a disk error.
    """
    temporary = temporary_beside(path)
    try:
        write_file(temporary, data, durable=durable)
        retry_while_open(lambda: temporary.replace(path))
        if durable:
            sync_folder(path.parent)  # the file's own fsync does not store its new name
    except OSError as error:
        with suppress(OSError):  # report the first disk error, not a second one on cleaning up
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def temporary_beside(path: Path) -> Path:
    """Return a name in the folder of `path` that no other write has."""
    # A name has at most 255 bytes: about 30 of the ASCII prefix and 50 characters of up to four bytes.
    name = f"{TEMPORARY_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{path.name}"
    return path.with_name(name[:80])


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


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting; raises OSError for anything else.

    A folder that somebody sent may hold a named pipe, which would be waited for without end, or a device.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = open_binary(path, flags)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file; raises OSError."""
    with open_regular(path) as file:
        return file.read()


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
    existing = next((parent for parent in path.parents if parent.exists()), Path())
    about = ""
    with suppress(OSError):  # a working folder that was removed has no disk
        about = f" ({shutil.disk_usage(existing).free:,} bytes free)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        fix, about = fix.replace("free some space", "allow writing there"), ""
    if error.errno in _FIXES:
        fix, about = _FIXES[error.errno], ""
    if sys.platform == "win32" and isinstance(error, PermissionError):
        fix = "close the program that has the file open, or choose another folder with --output"
    elif sys.platform == "win32" and len(str(path.absolute())) >= _WINDOWS_PATH_CHARACTERS - 12:
        fix = "its path is too long for Windows: enable long paths, or choose a shorter --output"
    return MachineError(f"cannot write {path}: {error.strerror or error}{about}", fix=fix)


# What helps against an error that is neither one of room nor of permission.
_FIXES: Mapping[int | None, str] = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f unlimited`), or choose a folder on "
    "another file system",
    errno.EISDIR: "move the folder that has the name of this file away",
    errno.ENOTEMPTY: "move the folder that has the name of this file away",
    errno.ENOTDIR: "move the file that has the name of a folder away, or choose another folder with --output or "
    "--set data.cache_dir=FOLDER",
    errno.ENOENT: "the folder is gone: make it again, or choose another one with --output",
    errno.ENAMETOOLONG: "choose shorter names for the run and its folder",
    errno.EINVAL: "choose a name without characters that this file system refuses, such as `:`",
    errno.ELOOP: "remove the link that leads to itself",
}


def system_refused(error: OSError) -> MachineError:
    """Return a MachineError of one line for an error of the system that nobody expected where it came."""
    named = f": {error.filename}" if error.filename is not None else ""
    return MachineError(
        f"the system refuses it: {error.strerror or error}{named}"[:400],
        fix=_FIXES.get(error.errno, "check that what is named is there and may be used"),
    )


def unreadable(path: Path, error: OSError) -> MachineError:
    """Return a MachineError of one line for a file that is there and cannot be read."""
    return MachineError(
        f"cannot read {path}: {error.strerror or error}", fix="make it readable for you"
    )


_QUOTES = (('"', '"'), ("'", "'"), ("\u201c", "\u201d"))


def user_path(text: str) -> str:
    """Return a path as somebody typed or pasted it, without what is not part of it.

    Windows copies a path in quotation marks, pasting brings blanks and line breaks around it, and `~` is the
    home folder also where no shell has replaced it. Variables such as $HOME stay: they may be names of folders.
    """
    path = text.strip()
    for first, last in _QUOTES:
        if len(path) > 2 and path.startswith(first) and path.endswith(last):
            path = path[1:-1].strip()
    return os.path.expanduser(path)  # noqa: PTH111 - Path raises where there is no home folder


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
    with open_regular(path) as file:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()


def json_bytes(value: Any) -> bytes:
    """Encode as readable UTF-8 JSON with a final newline; NaN and infinity are refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises RequestError with line and column, or the duplicate key."""
    try:
        text = retry_while_open(lambda: read_regular(path)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read {path}: {error}", fix="give a readable UTF-8 JSON file"
        ) from None
    return json_object(text, name=str(path))


def json_object(text: str, *, name: str) -> dict[str, Any]:
    """Parse a JSON object; raises RequestError with `name`, line and column, or the duplicate key."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=bounded_int,
        )
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


def bounded_int(text: str) -> int | float:
    """Read a whole number of a JSON file; one that no float can hold is infinite, as 1e999 is."""
    return int(text) if len(text) <= sys.float_info.max_10_exp else math.inf


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
    # What another run removes while this looks is passed over, as are folders that may not be read.
    for parent, folders, names in os.walk(folder):
        folders[:] = (name for name in folders if not name.startswith("."))
        for name in names:
            file = os.path.join(parent, name)  # noqa: PTH118 - a Path would cost more than the stat
            with suppress(OSError):
                if not name.startswith(".") and S_ISREG((stat := os.stat(file)).st_mode):  # noqa: PTH116
                    yield file, stat
