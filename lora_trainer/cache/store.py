"""The shared cache of latents, text embeddings and masks: keys by content, entries checked on every read.

An entry is one safetensors file of float32 arrays at ROOT/KIND/ab/DIGEST.safetensors. Its digest is
a hash of everything the arrays depend on, so it is never stale; its header carries that key and
a checksum over the key, names, shapes and bytes, so it is never wrong: a damaged or swapped entry is
moved aside, reported and encoded again. Writes are atomic but not flushed: they can be repeated.

An entry whose checksum was verified once is not read again before training: it is remembered in the cache folder by
(size, mtime_ns, inode). A training holds a lease, a locked file in the folder, and the cache can be emptied while
nobody does; the system releases the lock when the process ends, also by a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as build_safetensors

from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    CappedFolder,
    disk_error,
    retry_while_open,
    write_atomic,
)
from lora_trainer.common.memo import MEMO_FILE, MemoTable, rows
from lora_trainer.common.processes import gc_disabled

# Part of every key: raise it when decoding, cutting or the layout of entries changes.
FORMAT_VERSION = 3
# Numbers of the encoders, and tokens and masks.
DTYPES = (np.float32, np.int64)
# One metadata key holding JSON: safetensors writes several keys in random order, and equal entries
# should be equal files.
_METADATA_KEY = "lora-train cache entry"
DAMAGED_FOLDER = "damaged"
_LEFTOVER_AGE_S = 3600.0
_TOUCH_AFTER_NS = 3600 * 10**9


Kind = Literal["latents", "text", "masks"]
Arrays = dict[str, NDArray[np.float32]]
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class CacheKey(NamedTuple):
    """Everything the arrays of one entry depend on: the fields as canonical JSON, and a digest of all.

    The digest is the SHA-256 of format version, kind and fields. The fields are text because a dictionary in each of
    200,000 keys takes 100 MB.
    """

    kind: Kind
    digest: str
    fields: str

    @classmethod
    def of(cls, kind: Kind, **fields: str | int) -> CacheKey:
        """Return the key of an entry; raises ValueError or TypeError for a value that JSON cannot hold."""
        text = _ENCODER.encode(fields)
        name = f'{{"fields":{text},"format":{FORMAT_VERSION},"kind":{_ENCODER.encode(kind)}}}'
        return cls(kind, hashlib.sha256(name.encode()).hexdigest(), text)


_UNREADABLE = (SafetensorError, struct.error, ValueError, LookupError, TypeError, RecursionError)


class Damaged(Exception):
    """The bytes are not a whole entry of the wanted key; the message says how."""


def parse(data: bytes, *, digest: str) -> Arrays:
    """Return the arrays of a whole entry of that key; raises Damaged for anything else."""
    try:
        (header_bytes,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
        header = json.loads(metadata[_METADATA_KEY])
        arrays = parse_safetensors(data)
        key, whole = header["key"], _header(CacheKey.of(header["kind"], **header["fields"]), arrays)
    except _UNREADABLE as error:
        raise Damaged(f"unreadable header: {type(error).__name__}") from None
    if key != digest:
        raise Damaged("it holds another entry")
    if header != whole:
        raise Damaged("its checksum does not match")
    return arrays


def _header(key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    digest = hashlib.sha256(key.digest.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(_ENCODER.encode([name, array.dtype.name, list(array.shape)]).encode())
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(little.reshape(-1).view(np.uint8).data)
    return {
        "format_version": FORMAT_VERSION,
        "kind": key.kind,
        "key": key.digest,
        "fields": json.loads(key.fields),
        "sha256": digest.hexdigest(),
    }


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Entries in a size-capped folder shared by all runs, threads and processes."""

    folder: CappedFolder
    on_problem: Callable[..., None]
    """Called like `EventStream.problem`: a sentence about the event, and in `fix` a sentence about the remedy."""

    def path(self, key: CacheKey) -> Path:
        """Return where the entry of `key` is or would be."""
        return Path(self.file(key))

    def file(self, key: CacheKey) -> str:
        """Return the same as text: a `Path` for each of 200,000 entries is slow."""
        return f"{self.folder.root}/{key.kind}/{key.digest[:2]}/{key.digest}.safetensors"

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
            problem = f"cannot be read ({error.strerror or error})"
        except Damaged as error:
            problem, aside = f"is damaged ({error})", self.folder.root / DAMAGED_FOLDER / path.name
            try:
                aside.parent.mkdir(exist_ok=True)
                retry_while_open(lambda: path.replace(aside))
                problem += f", moved to {DAMAGED_FOLDER}/"
            except OSError as refusal:
                problem += f" and cannot be moved aside ({refusal.strerror or refusal})"
        else:
            self.touch(key, stat)
            return arrays
        name = path.relative_to(self.folder.root).as_posix()
        self.on_problem(
            f"cache entry {name} {problem}; it is encoded again",
            fix="nothing to do; if this repeats, check the disk",
            file=name,
            code="CAC-01",
        )
        try:
            # If the damaged file is still there, its new time no longer matches the remembered stamp.
            os.utime(path)
        except FileNotFoundError:
            pass
        except OSError:  # times are for owners
            with suppress(OSError):
                (self.folder.root / MEMO_FILE).unlink()
        return None

    def touch(self, key: CacheKey, stat: os.stat_result) -> None:
        """Set an entry's access time to now, unless it is younger than an hour; `stat` is the entry's.

        Most disks are mounted without access times, and a prune by another run removes the entries with the
        oldest ones first; an hour more or less does not matter for that. The modification time stays: `missing`
        recognises a verified entry by it.
        """
        now_ns = time.time_ns()
        if now_ns - max(stat.st_atime_ns, stat.st_mtime_ns) > _TOUCH_AFTER_NS:
            with suppress(OSError):
                try:
                    os.utime(self.file(key), ns=(now_ns, stat.st_mtime_ns))
                except PermissionError:  # times of one's choice are for owners; others may set now
                    os.utime(self.file(key))

    def write(self, key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store float32 and int64 arrays; raises MachineError, TypeError for another dtype."""
        wrong = {name: str(one.dtype) for name, one in arrays.items() if one.dtype not in DTYPES}
        if wrong or not arrays:
            raise TypeError(f"cache entries are float32 or int64 arrays, got {wrong or 'none'}")
        # safetensors reads the memory behind a transposed array as if it were in order.
        ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        header = _ENCODER.encode(_header(key, ordered))
        data = build_safetensors(ordered, metadata={_METADATA_KEY: header})
        path = self.path(key)
        if not path.parent.is_dir():
            self.folder.create()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(path, error) from error
        write_atomic(path, data, durable=False)

    def check_room(self, needed_bytes: int, *, missing_bytes: int) -> None:
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
        free_bytes = shutil.disk_usage(self.folder.root).free
        if missing_bytes > free_bytes:
            raise MachineError(
                f"this run's cache still needs {missing_bytes:,} bytes in {self.folder.root}, "
                f"{free_bytes:,} are free",
                fix="free some space or choose another folder with --set data.cache_dir=FOLDER",
            )

    def prune(self, keep: Iterable[CacheKey]) -> int:
        """Bring the folder under its limit, sparing entries in `keep`; return the bytes freed."""
        # Only a killed run leaves a temporary file this long; the folder's size counts none.
        is_ours = (self.folder.root / self.folder.marker).exists()
        for path in self.folder.root.glob(f"*/*/{TEMPORARY_PREFIX}*") if is_ours else ():
            # Another run finished it, or on Windows still writes it.
            with suppress(FileNotFoundError, PermissionError):
                if time.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                    path.unlink()
        freed_bytes = self.folder.prune(self.file(key) for key in keep)
        if freed_bytes:
            _forget_removed(self.folder)
        return freed_bytes


# Name and version of the memo's table of entries that were found whole: their stamps by digest.
_WHOLE_ENTRIES = ("whole entries", "2")
# Younger entries may not be on the disk yet: a power cut can still take what was just read.
SETTLED_NS = 60 * 10**9


@gc_disabled()
def missing(keys: Iterable[CacheKey], cache: Cache) -> frozenset[str]:
    """Return the digests of the entries that are not there or were damaged."""
    absent, to_read = set(), []
    settled_ns = time.time_ns() - SETTLED_NS

    def look_at(key: CacheKey, *, known_stamp: str) -> None:
        try:
            stat = os.stat(cache.file(key))  # noqa: PTH116 - a Path for each of 200,000 is slow
        except OSError:
            absent.add(key.digest)
            return
        # Without ctime, which `Cache.touch` changes: nobody but us writes these files.
        stamp = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        if stamp == known_stamp:
            cache.touch(key, stat)
        else:
            to_read.append((key, stamp if stat.st_mtime_ns < settled_ns else None))

    # Row by row: the stamps of 200,000 entries would take 50 MiB.
    others = {key.digest: key for key in keys}
    for digest, known_stamp in rows(cache.folder.root, *_WHOLE_ENTRIES):
        if digest in others:
            look_at(others.pop(digest), known_stamp=known_stamp)
    for key in others.values():
        look_at(key, known_stamp="")
    # Several at a time, as reading and hashing release the GIL.
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        whole = pool.map(lambda pair: cache.read(pair[0]) is not None, to_read, chunksize=16)
    name, version = _WHOLE_ENTRIES
    memo = MemoTable(name=name, version=version, folder=cache.folder.root)
    for (key, stamp_if_settled), is_whole in zip(to_read, whole, strict=True):
        if not is_whole:
            absent.add(key.digest)
        elif stamp_if_settled is not None:
            memo.put(key.digest, stamp_if_settled)
    try:
        memo.save()
    except MachineError as error:
        fix = "nothing to do; the entries are read again at the next start"
        cache.on_problem(error.found, fix=fix, file=MEMO_FILE, code="CAC-04")
    return frozenset(absent)


def _forget_removed(folder: CappedFolder) -> None:
    whole_entries = MemoTable.load(folder.root, *_WHOLE_ENTRIES)
    whole_entries.retain({path.stem for path, _ in entries(folder)})


_DOOR = ".in-use.lock"
_MARKS = ".in-use-*.lock"
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_KINDS = ("latents", "text", "masks", DAMAGED_FOLDER)
_WITHIN_S = 60.0


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


def clear(folder: CappedFolder) -> tuple[int, int]:
    """Remove all entries; return how many there were, and their bytes.

    Raises MachineError while a training uses them, and for a folder that is not a cache.
    """
    root = folder.root
    if not (root / folder.marker).is_file():
        raise MachineError(
            f"{root} is not a cache of lora-train", fix="name the cache's folder, or do nothing"
        )
    with unused(root):
        sizes_bytes = dict(entries(folder))
        for path in sizes_bytes:
            path.unlink(missing_ok=True)
        _forget_removed(folder)
    return len(sizes_bytes), sum(sizes_bytes.values())


@contextmanager
def unused(root: Path) -> Iterator[int]:
    """Keep trainings from a cache meanwhile; yields how many marks of killed trainings were removed.

    Raises MachineError while a training uses the cache and when the disk refuses.
    """
    try:
        with FileLock(root / _DOOR, timeout=0):
            marks = list(root.glob(_MARKS))
            for mark in marks:
                lock = FileLock(mark)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    raise MachineError(
                        f"a training uses the cache in {root}", fix="wait for it, or stop it first"
                    ) from None
                lock.release(force=True)
                mark.unlink(missing_ok=True)  # its process was killed
            yield len(marks)
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
