"""The repairs of `doctor --fix`: locks, unfinished files and damaged cache files that killed trainings left.

Inputs are the cache folder and the folder of runs; outputs are sentences on the removed files. Everything
removed is made again by the next training. Datasets, resume states, exported files and records of runs are
never touched. torch is not imported, because a broken torch is a reason to call the doctor.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lora_trainer.cache.keys import Damaged, parse
from lora_trainer.cache.lease import entries, unused
from lora_trainer.cache.store import DAMAGED_FOLDER
from lora_trainer.common import memo
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import TEMPORARY_PREFIX, CappedFolder
from lora_trainer.run.machine_report import MachineCheck, ok, warn
from lora_trainer.run.run_folder import EVENTS_FILE, STATES, claim, has_no_record


def mend(cache: CappedFolder, runs: Path) -> list[MachineCheck]:
    """Mend a cache and the runs beside it; each change is one sentence, and no change is one too."""
    repairs = [*_cache(cache), *_runs(runs)]
    return repairs or [ok("Nothing had to be mended.")]


def _cache(cache: CappedFolder) -> Iterator[MachineCheck]:
    root = cache.root
    if not (root / cache.marker).is_file():
        return  # no training has used it yet
    try:
        with unused(root) as marks:
            yield from _done(marks, f"mark{_s(marks)} of killed trainings", root)
            unfinished = list(root.glob(f"**/{TEMPORARY_PREFIX}*"))
            yield from _done(_removed(unfinished), f"unfinished file{_s(len(unfinished))}", root)
            memos = [root / memo.FILE_NAME] if memo.is_damaged(root) else []
            yield from _done(_removed(memos), "damaged memo", root)
            damaged = [path for path, _ in entries(cache) if _is_damaged(path)]
            word = "entry" if len(damaged) == 1 else "entries"
            yield from _done(_removed(damaged), f"damaged {word}", root)
    except MachineError as error:
        yield warn(f"The cache was left alone: {error.found}.", error.fix)


def _runs(runs: Path) -> Iterator[MachineCheck]:
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
                removed = _removed(unfinished)
                if is_empty:
                    _removed([entry for entry in path.iterdir() if entry.name != ".lock"])
        except MachineError:
            continue  # it is being trained, so its unfinished files are in use
        if is_empty:
            with suppress(OSError):  # another training may have claimed the folder just now
                (path / ".lock").unlink()
                path.rmdir()
            yield ok(f"Removed {path}, a run that ended before its first step.")
        else:
            yield from _done(removed, f"unfinished file{_s(removed)}", path)


def _done(number: int, noun: str, folder: Path) -> Iterator[MachineCheck]:
    if number:
        yield ok(f"Removed {number:,} {noun} from {folder}.")


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _removed(paths: list[Path]) -> int:
    """Remove files and folders; return how many are gone, as Windows keeps open ones."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    return sum(not path.exists() for path in paths)


def _is_damaged(path: Path) -> bool:
    """Whether an entry was moved aside, or its bytes are no longer those that were written."""
    if path.parent.name == DAMAGED_FOLDER:
        return True
    try:
        parse(path.read_bytes(), digest=path.stem)
    except (Damaged, OSError):
        return True
    return False
