"""The work of `doctor`: sentences about this machine and the device trainings use, and repairs.

Input is the detected hardware and the folder of the cache; output are sentences, each marked ok or warn.
torch is not imported, because a broken torch is a reason to call the doctor.

The repairs remove locks, unfinished files and damaged entries that killed trainings left. The next training makes all
of it again. Datasets, resume states, exported files and records of runs are never touched, nor anything that a
training uses. Each repair is one sentence.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, StrictUndefined
from rich.console import Group, RenderableType
from rich.text import Text

from lora_trainer import __version__
from lora_trainer.cache.store import DAMAGED_FOLDER, Damaged, entries, parse, unused
from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import shown
from lora_trainer.common.files import TEMPORARY_PREFIX, CappedFolder
from lora_trainer.common.wording import gib
from lora_trainer.hardware.machine import (
    PURPOSES,
    Hardware,
    fits_xformers,
    is_optional,
    package_notes,
    tier,
    tier_problem,
)
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.run.run_folder import EVENTS_FILE, STATES, claim, has_no_record

Mark = Literal["ok", "warn"]
_STYLES: Mapping[Mark, str] = {"ok": "green", "warn": "bold yellow"}


class MachineCheck(NamedTuple):
    """One sentence about the machine; `fix` is an advice, for a warning the way to cure it."""

    mark: Mark
    sentence: str
    fix: str = ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


ok, warn = partial(MachineCheck, "ok"), partial(MachineCheck, "warn")


def _lacking(gpu: Gpu) -> str:
    """Return the optimizers that are not there for a GPU."""
    settings = (key.partition("=") for key in gpu.can.lacks)
    return ", ".join(value for key, _, value in settings if key == "optimizer.name")


def checks(
    hardware: Hardware, *, cache: Path, environment: Mapping[str, str]
) -> Iterator[MachineCheck]:
    """Yield all sentences about a machine, the most important first; they stand in machine_report.txt."""
    sentences = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    sentences.filters["capital"] = _capital
    sentences.tests["optional"] = is_optional
    notes, disk_bytes, disk_fault = package_notes(hardware.packages), 0, ""
    notes |= {name: f"{why}: pip uninstall {name}" for name, why in hardware.unfit.items()}
    advised = [name for name in notes if name != "xformers" or fits_xformers(hardware.torch)]
    try:
        disk_bytes = hardware.disk_free_bytes(cache)
    except OSError as error:
        disk_fault = error.strerror or str(error)
    file = Path(__file__).with_suffix(".txt")
    # A path may hold the arrow, but no separator of units, which `shown` escapes.
    source = file.read_text(encoding="utf-8").replace(" => ", "\x1f")
    text = sentences.from_string(source).render(
        hardware=hardware,
        tier=tier,
        tier_problem=tier_problem,
        gib=gib,
        lacking=_lacking,
        version=__version__,
        python=platform.python_version(),
        system=platform.system() or sys.platform,
        notes=notes,
        missing=[name for name in advised if is_optional(name) and hardware.packages[name] is None],
        purposes=PURPOSES,
        cache=shown(str(cache)),
        disk_bytes=disk_bytes,
        disk_fault=disk_fault,
        is_offline=environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        has_compiler=sys.platform == "win32" or shutil.which("cc") or shutil.which("gcc"),
    )
    for line in text.splitlines():
        mark, _, words = line.partition(": ")
        sentence, _, fix = words.partition("\x1f")
        yield MachineCheck("ok" if mark == "ok" else "warn", sentence, fix)


def doctor_text(results: list[MachineCheck]) -> RenderableType:
    """Return the sentences for people, with their marks, and the number of warnings."""
    lines = []
    for check in results:
        fix = f" Fix: {check.fix}." if check.mark == "warn" else f" {_capital(check.fix)}."
        sentence = f"  {check.sentence}{fix if check.fix else ''}"
        lines.append(Text.assemble((f"{check.mark:<4}", _STYLES[check.mark]), sentence))
    warnings = sum(check.mark == "warn" for check in results)
    plural = "" if warnings == 1 else "s"
    last = f"{warnings} warning{plural}, marked warn." if warnings else "No problems."
    return Group(*lines, Text(last, style="bold"))


def doctor_json(hardware: Hardware) -> dict[str, Any]:
    """Return the facts about this machine as plain values, each with its reason."""
    return {
        "gpus": {"value": [gpu.name for gpu in hardware.gpus], "reason": hardware.gpu_reason},
        "accelerator": hardware.accelerator()[1],
        **{
            name: {"value": getattr(hardware, name), "reason": reason}
            for name, reason in hardware.reasons.items()
        },
        "packages": dict(hardware.packages),
        "package_notes": package_notes(hardware.packages),
    }


# ---- the repairs of `doctor --fix`


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
        except MachineError as error:  # it is being trained, or the disk refuses
            yield warn(f"A run was left alone: {error.found}.", error.fix)
            continue
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
