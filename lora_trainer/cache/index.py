"""The missing entries of a run; an entry whose checksum was verified once is not read again.

Inputs: the keys, the cache. Output: the digests of the entries to encode; damaged entries have been moved aside.
Verified entries are remembered in the cache folder by (size, mtime_ns, inode). Training verifies the checksum of
each entry that it reads again.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.pool import ThreadPool

from lora_trainer.cache.keys import CacheKey
from lora_trainer.cache.store import Cache
from lora_trainer.common.errors import MachineError
from lora_trainer.common.memo import FILE_NAME, MemoTable
from lora_trainer.common.processes import gc_disabled

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
