"""Leases of a cache folder: a training holds one, and the cache can be emptied while nobody does.

Inputs: the folder. Outputs: a locked file in it for each training, and the entries removed. The system releases the
lock when the process ends, also by a kill. Files that are no entries of this program stay.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lora_trainer.cache.store import DAMAGED_FOLDER
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder, disk_error

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
