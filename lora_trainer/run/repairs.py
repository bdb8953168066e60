"""The repairs of `doctor --fix`: removes locks, unfinished files and damaged entries that killed trainings left.

The next training makes all of it again. Datasets, resume states, exported files and records of runs are never
touched, nor anything that a training uses. Each repair is one sentence.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lora_trainer.cache.store import DAMAGED_FOLDER, Damaged, entries, parse, unused
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import TEMPORARY_PREFIX, CappedFolder
from lora_trainer.run.machine_report import MachineCheck, ok, warn
from lora_trainer.run.run_folder import EVENTS_FILE, STATES, claim, has_no_record


def mend(cache: CappedFolder, runs: Path) -> list[MachineCheck]:
    """Mend a cache and the runs in a folder; where nothing is to mend, the one sentence says so."""
    repairs = [*_mend_cache(cache), *_mend_runs(runs)]
    return repairs or [ok("Nothing had to be mended.")]


def _mend_cache(cache: CappedFolder) -> Iterator[MachineCheck]:
    root = cache.root
    if not (root / cache.marker).is_file():
        return  # no training has used it yet
    try:
        with unused(root) as marks:
            damaged = [path for path, _ in entries(cache) if _is_damaged(path)]
            counts = {
                "marks of killed trainings": marks,
                "unfinished files": _remove(list(root.glob(f"**/{TEMPORARY_PREFIX}*"))),
                "damaged entries": _remove(damaged),
            }
    except MachineError as error:
        yield warn(f"The cache was left alone: {error.found}.", error.fix)
        return
    for noun, count in counts.items():
        if count:
            yield ok(f"Removed from {root}: {noun} ({count:,}).")


def _is_damaged(path: Path) -> bool:
    """Return whether an entry was moved aside, or its bytes are no longer those that were written."""
    if path.parent.name == DAMAGED_FOLDER:
        return True
    try:
        parse(path.read_bytes(), digest=path.stem)
    except (Damaged, OSError):
        return True
    return False


def _mend_runs(runs: Path) -> Iterator[MachineCheck]:
    for events in sorted(runs.glob(f"*/{EVENTS_FILE}")):
        path = events.parent
        # Resume states that are being replaced (`.del-`) may be the newest whole ones, so they stay.
        unfinished = [
            *path.glob(f"{TEMPORARY_PREFIX}*"),
            *(path / STATES).glob(f"{TEMPORARY_PREFIX}*"),
        ]
        is_empty = has_no_record(path)
        if not unfinished and not is_empty:
            continue
        try:
            with claim(path):
                count = _remove(unfinished)
                if is_empty:
                    _remove([entry for entry in path.iterdir() if entry.name != ".lock"])
        except MachineError:
            continue  # it is being trained, so its unfinished files are in use
        if is_empty:
            with suppress(OSError):  # another training may have claimed the folder just now
                (path / ".lock").unlink()
                path.rmdir()
            yield ok(f"Removed {path}, a run that ended before its first step.")
        elif count:
            yield ok(f"Removed from {path}: unfinished files ({count:,}).")


def _remove(paths: Sequence[Path]) -> int:
    """Remove files and folders; return how many are gone, as Windows keeps open ones."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    return sum(not path.exists() for path in paths)
