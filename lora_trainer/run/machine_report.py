"""The work of `doctor`: sentences about this machine and the device trainings use.

Input is the detected hardware and the folder of the cache; output are sentences, each marked ok or warn.
torch is not imported, because a broken torch is a reason to call the doctor.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from lora_trainer import __version__
from lora_trainer.common.wording import gib
from lora_trainer.hardware.machine import (
    PURPOSES,
    Hardware,
    is_optional,
    package_notes,
    tier,
    tier_problem,
)

Mark = Literal["ok", "warn"]
_STYLES: Mapping[Mark, str] = {"ok": "green", "warn": "bold yellow"}
# Share of a GPU's memory that other programs may use before it is a warning.
_USED_BY_OTHERS = 0.15
_LITTLE_DISK_BYTES = 20 * 2**30
_LITTLE_MEMORY_BYTES = 15 * 2**30


class MachineCheck(NamedTuple):
    """One sentence about the machine; `fix` is an advice, for a warning the way to cure it."""

    mark: Mark
    sentence: str
    fix: str = ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


ok, warn = partial(MachineCheck, "ok"), partial(MachineCheck, "warn")


def judged(is_bad: bool, sentence: str, fix: str) -> MachineCheck:
    """Return a fact about the machine, with `fix` where it is bad."""
    return warn(sentence, fix) if is_bad else ok(sentence)


def checks(
    hardware: Hardware, *, cache: Path, environment: Mapping[str, str]
) -> Iterator[MachineCheck]:
    """Yield all sentences about a machine, the most important first."""
    yield from _devices(hardware)
    cores = f"{hardware.cpu_threads} core{'' if hardware.cpu_threads == 1 else 's'}"
    reason = hardware.reasons.get("cpu_threads", "")
    yield ok(f"The CPU is {hardware.cpu_name}; trainings use {cores} of it ({reason}).")
    total, free = hardware.ram_total_bytes, hardware.ram_free_bytes
    reason = hardware.reasons.get("ram_total_bytes", "memory of the machine")
    memory = f"{gib(free)} of {gib(total)} of memory are free ({reason})."
    fix = "parts of large bases stay in it during training: 32 GiB are enough for most"
    yield judged(total < _LITTLE_MEMORY_BYTES, memory, fix)
    yield from _packages(hardware)
    try:
        free_bytes = hardware.disk_free_bytes(cache)
    except OSError as error:
        fix = "choose another one with --set data.cache_dir=FOLDER"
        yield warn(f"The cache folder {cache} cannot be read: {error.strerror or error}.", fix)
    else:
        stored = (
            f"Encoded images and captions are stored in {cache}, where {gib(free_bytes)} are free."
        )
        fix = "lora-train doctor --clear-cache empties it"
        yield judged(free_bytes < _LITTLE_DISK_BYTES, stored, fix)
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        fix = "unset it to download base models that are not on this machine"
        yield ok("Nothing is downloaded, because HF_HUB_OFFLINE is set.", fix)
    if sys.platform != "win32" and shutil.which("cc") is None and shutil.which("gcc") is None:
        sentence = "There is no C compiler, so hardware.compile=blocks cannot be used."
        yield ok(sentence, "install gcc to use it")


def _devices(hardware: Hardware) -> Iterator[MachineCheck]:
    """Yield the device that trainings use and why, then each GPU."""
    (best, why), several = hardware.accelerator(), len(hardware.gpus)
    if best is None:
        why = "torch can use none of the GPUs" if several else why
        fix = "the embedded base trains here in minutes; other bases need a GPU with 6 GiB or more"
        yield warn(f"Trainings run on the CPU, because there is no usable GPU: {why}.", fix)
    else:
        precision = "bf16" if best.has_bf16 else "fp16, as it does not compute bf16 itself"
        why = f", the best of {several} for this torch" if several > 1 else ""
        presets = f"with the presets for {tier(best.total_bytes)} GiB"
        yield ok(f"Trainings run on {best.name}{why}, in {precision}, {presets}.")
        if problem := tier_problem(best.total_bytes):
            fix = "lower data.resolution or adapter.rank if a plan does not fit"
            yield warn(f"{_capital(problem)}.", fix)
    for gpu in hardware.gpus:
        if problem := hardware.against(gpu):
            reason, _, command = problem.partition("pip install ")
            fix = f"pip install {command}" if command else "use another GPU"
            yield warn(f"{reason.rstrip(' :;')}.", fix)
            continue
        details = [f"driver {gpu.driver}"] if gpu.driver else []
        if capability := gpu.compute_capability:
            details.append(f"compute capability {capability[0]}.{capability[1]}")
        more = f" ({', '.join(details)})" if details else ""
        free = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        described = f"GPU {gpu.index} is {gpu.name}, {free}{more}."
        fix = "close other programs that use it, because plans use only free memory"
        yield judged(1 - gpu.free_bytes / gpu.total_bytes > _USED_BY_OTHERS, described, fix)
        if hardware.pinnable_bytes is not None and gpu.can.pins:
            reason = hardware.reasons.get("pinnable_bytes", "as set")
            yield ok(
                f"Of the machine's memory {gib(hardware.pinnable_bytes)} may be pinned for copies "
                f"to it ({reason}); unpinned copies are slower."
            )
        if gpu.spills:
            yield ok(
                "When its memory is full, its driver uses host memory, which makes trainings ten "
                "times slower; plans stay below that limit."
            )
        lacking = [wish.partition("=")[2] for wish in gpu.can.lacks if wish.startswith("optimizer")]
        if names := ", ".join(lacking):
            yield ok(f"{_capital(gpu.can.says)} has no {names}: adamw is used instead.")


def _packages(hardware: Hardware) -> Iterator[MachineCheck]:
    notes, gpu = package_notes(hardware.packages), hardware.accelerator()[0]
    if hardware.torch is not None:
        version = f"Python {platform.python_version()} on {platform.system() or sys.platform}"
        yield ok(f"lora-train {__version__} runs on {version} with {hardware.torch}.")
    missing = [name for name in notes if is_optional(name) and hardware.packages[name] is None]
    for name in [name for name in notes if name not in missing]:
        reason, _, command = notes[name].partition(": ")
        package = f"{name} {hardware.packages[name] or ''}".rstrip()
        yield warn(f"{package} ({PURPOSES[name]}): {reason}.", command)
    if all(is_optional(name) for name in notes):
        yield ok("All required packages are installed.")
    for name in missing:
        if name in ("xformers", "triton") and (gpu is None or not gpu.can.compiles):
            continue  # useful on NVIDIA's GPUs only
        purpose = PURPOSES[name].removeprefix("optional: ")
        sentence = f"{name} is not installed and not required: {purpose}."
        yield ok(sentence, f"to install it: pip install {name}")


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
        "gpu_reason": hardware.gpu_reason,
        "accelerator": hardware.accelerator()[1],
        **{
            name: {"value": getattr(hardware, name), "reason": reason}
            for name, reason in hardware.reasons.items()
        },
        "packages": dict(hardware.packages),
        "package_notes": package_notes(hardware.packages),
    }
