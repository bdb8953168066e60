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

from rich.console import Group, RenderableType
from rich.text import Text

from lora_trainer import __version__, families
from lora_trainer.cache.store import DAMAGED_FOLDER, Damaged, entries, parse, unused
from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import shown
from lora_trainer.common.files import TEMPORARY_PREFIX, CappedFolder
from lora_trainer.common.wording import gib
from lora_trainer.families.base.tables import head
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
from lora_trainer.planning.known_pace import known_counts, load_factor, others_text
from lora_trainer.run.run_folder import EVENTS_FILE, STATES, claim, has_no_record

Mark = Literal["ok", "warn"]
_STYLES: Mapping[Mark, str] = {"ok": "green", "warn": "bold yellow"}
# The share of a GPU's memory that other programs may use before it is a warning.
_MOST_USED_BY_OTHERS = 0.15
_LITTLE_DISK_BYTES = 20 * 2**30
_LITTLE_MEMORY_BYTES = 15 * 2**30
# Packages that are of use only with GPUs for which code is compiled.
_WHERE_COMPILED = ("xformers", "triton")


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
    """Yield all sentences about a machine, the most important first."""
    yield from _accelerator(hardware)
    for gpu in hardware.gpus:
        yield from _gpu(hardware, gpu)
    yield from _processor_and_memory(hardware)
    yield clock(hardware, cache)
    yield from _packages(hardware)
    yield _cache_disk(hardware, cache)
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield ok(
            "Nothing is downloaded, because HF_HUB_OFFLINE is set.",
            "unset it to download base models that are not on this machine",
        )
    has_compiler = sys.platform == "win32" or shutil.which("cc") or shutil.which("gcc")
    if not has_compiler:
        yield ok(
            "No C compiler was found, so hardware.compile=blocks cannot be used.",
            "install gcc to use it",
        )


def _judged(sentence: str, *, is_bad: bool, fix: str) -> MachineCheck:
    """Return a fact about the machine, a warning with `fix` where it is bad."""
    return warn(sentence, fix) if is_bad else ok(sentence)


def _accelerator(hardware: Hardware) -> Iterator[MachineCheck]:
    """Yield the device that trainings use, and why."""
    best, why = hardware.accelerator()
    count = len(hardware.gpus)
    if best is None:
        fix = "the embedded base trains here in minutes; other bases need a GPU with 6 GiB or more"
        if count:
            why, fix = "torch can use none of the GPUs", "see below"
        yield warn(f"Trainings run on the CPU, because no GPU can be used: {why}.", fix)
        return
    among = f", the best of {count} for this torch" if count > 1 else ""
    precision = "bf16" if best.has_bf16 else "fp16, as it does not compute bf16 itself"
    presets = f"with the presets for {tier(best.total_bytes)} GiB"
    yield ok(f"Trainings run on {best.name}{among}, in {precision}, {presets}.")
    if problem := tier_problem(best.total_bytes):
        fix = "lower data.resolution or adapter.rank if a plan does not fit"
        yield warn(f"{_capital(problem)}.", fix)


def _gpu(hardware: Hardware, gpu: Gpu) -> Iterator[MachineCheck]:
    reason, cure = hardware.against(gpu)
    if reason:
        yield warn(f"{reason}.", cure)
        return
    details = []
    if gpu.driver:
        details.append(f"driver {gpu.driver}")
    if gpu.compute_capability:
        details.append(gpu.capability)
    more = f" ({', '.join(details)})" if details else ""
    yield _judged(
        f"GPU {gpu.index} is {gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free{more}.",
        is_bad=gpu.free_bytes < (1 - _MOST_USED_BY_OTHERS) * gpu.total_bytes,
        fix="close other programs that use it, because plans use only free memory",
    )
    if hardware.pinnable_bytes is not None and gpu.can.pins:
        reason = hardware.reasons.get("pinnable_bytes", "as set")
        yield ok(
            f"Of the machine's memory {gib(hardware.pinnable_bytes)} may be pinned for copies to it "
            f"({reason}); unpinned copies are slower."
        )
    if gpu.spills:
        yield ok(
            "When its memory is full, its driver uses host memory, which makes trainings ten times "
            "slower; plans stay below that limit."
        )
    if lacking := _lacking(gpu):
        yield ok(f"{_capital(gpu.can.says)} has no {lacking}: adamw is used instead.")


def _processor_and_memory(hardware: Hardware) -> Iterator[MachineCheck]:
    cores = f"{hardware.cpu_threads} core{'' if hardware.cpu_threads == 1 else 's'}"
    reason = hardware.reasons.get("cpu_threads", "")
    yield ok(f"The CPU is {hardware.cpu_name}; trainings use {cores} of it ({reason}).")
    free, total = gib(hardware.ram_free_bytes), gib(hardware.ram_total_bytes)
    reason = hardware.reasons.get("ram_total_bytes", "memory of the machine")
    yield _judged(
        f"{free} of {total} of memory are free, of which plans may use "
        f"{gib(hardware.usable_ram_bytes)} ({reason}).",
        is_bad=hardware.ram_total_bytes < _LITTLE_MEMORY_BYTES,
        fix="parts of large bases stay in it during training: 32 GiB are enough for most",
    )


def clock(hardware: Hardware, cache: Path) -> MachineCheck:
    """Return where the predicted time of a training here comes from, and what other programs make of it."""
    gpu, _ = hardware.accelerator()
    counts = known_counts(cache, hardware, gpu=gpu, families=families.NAMES)
    known = ", ".join(f"{head(family)['name']}: {count}" for family, count in counts.items())
    others = others_text(hardware, gpu)
    estimated = (
        f"The time of a training is an estimate until one has finished on this machine; {others}."
    )
    predicted = f"The time of a training is predicted from finished runs on this machine ({known}); {others}."
    return _judged(
        predicted if known else estimated,
        is_bad=load_factor(hardware, gpu) > 1,
        fix="close them if you can: a training takes longer beside them",
    )


def _packages(hardware: Hardware) -> Iterator[MachineCheck]:
    """Yield the version of this program, packages that are wrong, and optional ones that are missing."""
    if hardware.torch is not None:
        python = f"Python {platform.python_version()} on {platform.system() or sys.platform}"
        yield ok(f"lora-train {__version__} runs on {python} with {hardware.torch}.")
    versions, gpu = hardware.packages, hardware.accelerator()[0]
    notes = package_notes(versions)
    notes |= {name: f"{why}: pip uninstall {name}" for name, why in hardware.unfit.items()}
    missing = [
        name
        for name in notes
        if is_optional(name)
        and versions[name] is None
        and (name != "xformers" or fits_xformers(hardware.torch))
    ]
    for name, note in notes.items():
        # An xformers that is neither installed nor made for this torch is not worth a word.
        if name in missing or (name == "xformers" and not versions[name]):
            continue
        reason, _, command = note.partition(": ")
        package = f"{name} {versions[name] or ''}".strip()
        yield warn(f"{package} ({PURPOSES[name]}): {reason}.", command)
    if all(map(is_optional, notes)):
        yield ok("All required packages are installed.")
    for name in missing:
        if name in _WHERE_COMPILED and (gpu is None or not gpu.can.compiles):
            continue
        purpose = PURPOSES[name].removeprefix("optional: ")
        sentence = f"{name} is not installed and not required: {purpose}."
        yield ok(sentence, f"to install it: pip install {name}")


def _cache_disk(hardware: Hardware, cache: Path) -> MachineCheck:
    place = shown(str(cache))
    try:
        free_bytes = hardware.disk_free_bytes(cache)
    except OSError as error:
        return warn(
            f"The cache folder {place} cannot be read: {error.strerror or error}.",
            "choose another one with --set data.cache_dir=FOLDER",
        )
    return _judged(
        f"Encoded images and captions are stored in {place}, where {gib(free_bytes)} are free.",
        is_bad=free_bytes < _LITTLE_DISK_BYTES,
        fix="lora-train doctor --clear-cache empties it",
    )


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
