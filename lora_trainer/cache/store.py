"""The shared cache of latents, text embeddings and masks: keyed by content, checked on every read.

An entry is one safetensors file of float32 arrays at ROOT/KIND/ab/DIGEST.safetensors. Its digest is
a hash of everything the arrays depend on, so it is never stale; its header carries that key and
a checksum over the key, names, shapes and bytes, so it is never wrong: a damaged or swapped entry is
moved aside, reported and encoded again. Writes are atomic but not flushed: they can be repeated.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

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
from lora_trainer.common.memo import FILE_NAME

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
