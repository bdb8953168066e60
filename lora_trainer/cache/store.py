"""The shared cache of latents, text embeddings and masks: keyed by content, checked on every read.

An entry is one safetensors file of float32 arrays at ROOT/KIND/ab/DIGEST.safetensors. Its digest is
a hash of everything the arrays depend on, so it is never stale; its header carries that key and
a checksum over the key, names, shapes and bytes, so it is never wrong: a damaged or swapped entry is
moved aside, reported and encoded again. Writes are atomic but not flushed: they can be repeated.

An entry whose checksum was verified once is not read again before training: it is remembered in the cache folder by
(size, mtime_ns, inode). A training holds a lease, a locked file in the folder, and the cache can be emptied while
nobody does; the system releases the lock when the process ends, also by a kill.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout
from numpy.typing import NDArray

from lora_trainer.cache.keys import Arrays, CacheKey, Damaged, build, parse
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    CappedFolder,
    disk_error,
    retry_while_open,
    write_atomic,
)
from lora_trainer.common.memo import FILE_NAME, MemoTable
from lora_trainer.common.processes import gc_disabled

DAMAGED_FOLDER = "damaged"
_LEFTOVER_AGE_S = 3600.0
_TOUCH_AFTER_NS = 3600 * 10**9


class ProblemListener(Protocol):
    """The signature of `EventStream.problem`: one sentence on the event, and as `fix` one on the remedy."""

    def __call__(self, what: str, *, fix: str, file: str | None = None, code: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Entries in a size-capped folder shared by all runs, threads and processes."""

    folder: CappedFolder
    on_problem: ProblemListener

    def path(self, key: CacheKey) -> Path:
        """Return where the entry of `key` is or would be."""
        return Path(self.file(key))

    def file(self, key: CacheKey) -> str:
        """Return the same as text: a `Path` for each of 200,000 entries is slow."""
        return f"{self._root}/{key.kind}/{key.digest[:2]}/{key.digest}.safetensors"

    @cached_property
    def _root(self) -> str:
        return str(self.folder.root)

    def has(self, key: CacheKey) -> bool:
        """Say whether there is an entry, without reading it; `read` may still find it damaged."""
        return os.path.exists(self.file(key))  # noqa: PTH110 - as `file` says

    def read(self, key: CacheKey) -> Arrays | None:
        """Return the arrays that were written under `key`, or None when there are none to trust.

        A damaged entry is moved to `damaged/` and reported; the caller encodes it again.
        """
        path = self.path(key)
        try:
            with path.open("rb", buffering=0) as file:
                stat, data = os.fstat(file.fileno()), file.read()
            arrays = parse(data, digest=key.digest)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(path, f"cannot be read ({error.strerror or error})")
            self._distrust(path)
            return None
        except Damaged as error:
            self._report(path, f"is damaged ({error}){self._moved_aside(path)}")
            self._distrust(path)
            return None
        self.touch(key, stat)
        return arrays

    def touch(self, key: CacheKey, stat: os.stat_result) -> None:
        """Set an entry's access time to now, unless it is younger than an hour; `stat` is the entry's.

        Most disks are mounted without access times, and a prune by another run removes the entries with the
        oldest ones first; an hour more or less does not matter for that. The modification time stays: the index
        recognises a verified entry by it.
        """
        now_ns = time.time_ns()
        if now_ns - max(stat.st_atime_ns, stat.st_mtime_ns) > _TOUCH_AFTER_NS:
            try:
                os.utime(self.file(key), ns=(now_ns, stat.st_mtime_ns))
            except PermissionError:  # times of one's choice are for owners; others may set now
                with suppress(OSError):
                    os.utime(self.file(key))
            except OSError:
                return

    def verify(self, key: CacheKey) -> bool:
        """Say whether the entry is there and whole; a damaged one is treated as by `read`."""
        return self.read(key) is not None

    def write(self, key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store float32 and int64 arrays; raises MachineError, TypeError for another dtype."""
        data = build(key, arrays)
        path = self.path(key)
        if not path.parent.is_dir():
            self.folder.create()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(path, error) from error
        write_atomic(path, data, durable=False)

    def check_room(self, needed_bytes: int, *, missing_bytes: int | None = None) -> None:
        """Make the folder and raise MachineError unless a run's entries fit, before any is encoded.

        `needed_bytes`: size of all entries of the run; `missing_bytes`: size of the entries to encode.
        """
        self.folder.create()
        limit_bytes = self.folder.limit_bytes
        if needed_bytes > limit_bytes:
            raise MachineError(
                f"this run's cache needs {needed_bytes:,} bytes, "
                f"data.cache_max_gib allows {limit_bytes:,}",
                fix=f"--set data.cache_max_gib={-(-needed_bytes // 2**30)}, or use fewer images",
            )
        missing_bytes = needed_bytes if missing_bytes is None else missing_bytes
        free_bytes = shutil.disk_usage(self.folder.root).free
        if missing_bytes > free_bytes:
            raise MachineError(
                f"this run's cache still needs {missing_bytes:,} bytes in {self.folder.root}, "
                f"{free_bytes:,} are free",
                fix="free some space or choose another folder with --set data.cache_dir=FOLDER",
            )

    def prune(self, keep: Iterable[CacheKey]) -> int:
        """Bring the folder under its limit, sparing entries in `keep`; return the bytes freed."""
        self._remove_leftovers()
        return self.folder.prune(self.file(key) for key in keep)

    def _remove_leftovers(self) -> None:
        # Only a killed run leaves a temporary file this long; the folder's size counts none.
        if (self.folder.root / self.folder.marker).exists():
            for path in _old_files(
                self.folder.root.glob(f"*/*/{TEMPORARY_PREFIX}*"), age_s=_LEFTOVER_AGE_S
            ):
                with suppress(PermissionError):  # Windows: another run still writes it
                    path.unlink(missing_ok=True)

    def _distrust(self, path: Path) -> None:
        """Let a bad entry that is still there not pass for one that was found whole before."""
        try:
            os.utime(path)  # its stamp is another now
        except FileNotFoundError:
            return
        except OSError:
            with suppress(OSError):
                (self.folder.root / FILE_NAME).unlink()

    def _moved_aside(self, path: Path) -> str:
        aside = self.folder.root / DAMAGED_FOLDER / path.name
        try:
            aside.parent.mkdir(exist_ok=True)
            retry_while_open(lambda: path.replace(aside))
        except OSError as error:
            return f" and cannot be moved aside ({error.strerror or error})"
        return f", moved to {DAMAGED_FOLDER}/"

    def _report(self, path: Path, what: str) -> None:
        name = path.relative_to(self.folder.root).as_posix()
        self.on_problem(
            f"cache entry {name} {what}; it is encoded again",
            fix="nothing to do; if this repeats, check the disk",
            file=name,
            code="CAC-01",
        )


def _old_files(paths: Iterable[Path], *, age_s: float) -> Iterator[Path]:
    for path in paths:
        try:
            old = time.time() - path.stat().st_mtime > age_s
        except FileNotFoundError:  # another run finished it
            continue
        if old:
            yield path


MAX_REMEMBERED = 1_000_000
SETTLED_NS = 60 * 10**9
"""Younger entries may not be on the disk yet: a power cut can still take what was just read."""
_FEW = 64


_STAMPS = "stamps"


@dataclass(kw_only=True)
class CacheIndex:
    """Entries that were read and found whole: a 64-bit hash of name and stamp of each.

    The stamp leaves out ctime, which `Cache.touch` changes: nobody but us writes these files. All stamps are
    one text of the memo, 16 MB at most, the latest used last.
    """

    table: MemoTable
    written_stamps: dict[int, None] = field(init=False)
    used: dict[int, None] = field(default_factory=dict)
    """Those asked for in this run, which are forgotten last."""
    _saved: bool = True

    def __post_init__(self) -> None:
        self.written_stamps = dict.fromkeys(_stamps(self.table.get(_STAMPS)))

    def has(self, stamp: int) -> bool:
        """Say whether the file of this stamp was found whole."""
        if stamp in self.written_stamps:
            self.used[stamp] = None
            return True
        return False

    def add(self, stamp: int) -> None:
        """Remember a file that is whole."""
        self.used[stamp] = None
        self._saved = False

    def save(self) -> None:
        """Write the verified entries, merged with those that other processes added; raises MachineError."""
        if self._saved:
            return
        others = _stamps(self.table.stored().get(_STAMPS))
        stamps = [*(stamp for stamp in others if stamp not in self.used), *self.used]
        self.table.put(_STAMPS, array("Q", stamps[-MAX_REMEMBERED:]).tobytes().hex())
        self.table.save()
        self._saved = True


def _stamps(text: str | None) -> array[int]:
    return array("Q", bytes.fromhex(text or ""))


@gc_disabled()
def missing(keys: Iterable[CacheKey], cache: Cache) -> frozenset[str]:
    """Return the digests of the entries that are not there or were damaged."""
    memo = CacheIndex(table=MemoTable.load(cache.folder.root, "whole entries"))
    absent, to_read = set(), []
    settled_ns = time.time_ns() - SETTLED_NS
    for key in keys:
        stat = _stat(cache.file(key))
        if stat is None:
            absent.add(key.digest)
            continue
        stamp = _stamp(key, stat)
        if memo.has(stamp):
            cache.touch(key, stat)
        else:
            to_read.append((key, stamp if stat.st_mtime_ns < settled_ns else None))
    whole = _verified([key for key, _ in to_read], cache)
    for (key, settled), is_whole in zip(to_read, whole, strict=True):
        if not is_whole:
            absent.add(key.digest)
        elif settled is not None:
            memo.add(settled)
    try:
        memo.save()
    except MachineError as error:
        fix = "nothing to do; the entries are read again at the next start"
        cache.on_problem(error.found, fix=fix, file=FILE_NAME, code="CAC-04")
    return frozenset(absent)


def _verified(keys: Sequence[CacheKey], cache: Cache) -> list[bool]:
    """Read entries; of many several at a time, as reading and hashing release the GIL."""
    if len(keys) < _FEW:
        return [cache.verify(key) for key in keys]
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        return pool.map(cache.verify, keys, chunksize=16)


def _stat(file: str) -> os.stat_result | None:
    try:
        return os.stat(file)  # noqa: PTH116 - a Path for each of 200,000 entries is slow
    except OSError:
        return None


def _stamp(key: CacheKey, stat: os.stat_result) -> int:
    name = f"{key.digest} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


_DOOR = ".in-use.lock"
_MARKS = ".in-use-*.lock"
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_KINDS = ("latents", "text", "masks", DAMAGED_FOLDER)
_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """The files and bytes removed from a cache."""

    folder: Path
    files: int
    bytes: int


@contextmanager
def in_use(root: Path) -> Iterator[None]:
    """Keep a cache from being cleared meanwhile; raises MachineError when the disk refuses."""
    mark = root / f".in-use-{platform.node()}-{os.getpid()}.lock"
    lock = FileLock(mark)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # One that clears the cache has the door shut: no training begins among entries that vanish.
        with FileLock(root / _DOOR, timeout=_WITHIN_S):
            lock.acquire(timeout=0)
    except Timeout:
        raise MachineError(f"the cache in {root} is being cleared", fix="start again") from None
    except OSError as error:
        raise disk_error(mark, error) from error
    except NotImplementedError:
        # A network folder without locks; clearing it during a training costs a --resume at worst.
        pass
    try:
        yield
    finally:
        lock.release(force=True)
        with suppress(OSError):
            mark.unlink(missing_ok=True)


def clear(folder: CappedFolder) -> Cleared:
    """Remove all entries; raises MachineError while a training uses them, or for a folder that is no cache."""
    root = folder.root
    if not (root / folder.marker).is_file():
        raise MachineError(
            f"{root} is no cache of lora-train", fix="name its folder, or do nothing"
        )
    with unused(root):
        return _removed(folder)


@contextmanager
def unused(root: Path) -> Iterator[int]:
    """Keep trainings from a cache meanwhile; yields how many marks of killed trainings were removed.

    Raises MachineError while a training uses the cache and when the disk refuses.
    """
    try:
        with FileLock(root / _DOOR, timeout=0):
            yield _refuse_used(root)
    except Timeout:
        raise MachineError(
            f"{root} is being cleared or used", fix="try again in a minute"
        ) from None
    except OSError as error:
        raise disk_error(root, error) from error


def entries(folder: CappedFolder) -> Iterator[tuple[Path, int]]:
    """Yield each entry with its size in bytes."""
    for path, stat in folder.files():
        if _ENTRY.fullmatch(path.name) and path.relative_to(folder.root).parts[0] in _KINDS:
            yield path, stat.st_size


def _refuse_used(root: Path) -> int:
    removed = 0
    for mark in root.glob(_MARKS):
        lock = FileLock(mark)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise MachineError(
                f"a training uses the cache in {root}", fix="wait for it, or stop it first"
            ) from None
        lock.release(force=True)
        mark.unlink(missing_ok=True)  # its process was killed
        removed += 1
    return removed


def _removed(folder: CappedFolder) -> Cleared:
    files = size_bytes = 0
    for path, entry_bytes in list(entries(folder)):
        path.unlink(missing_ok=True)
        files, size_bytes = files + 1, size_bytes + entry_bytes
    return Cleared(folder=folder.root, files=files, bytes=size_bytes)
