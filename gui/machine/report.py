"""What the page Machine says: what this machine trains with, what is missing, where things lie.

Inputs: what `lora-train doctor` finds, the environment, folders. Outputs: what report.html shows. No token
is ever read into it, only whether there is one.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lora_trainer import __version__
from lora_trainer.cache.store import clear, entries
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import build_config
from lora_trainer.dataset.scan import cache_in
from lora_trainer.hardware.kept_memory import keeper
from lora_trainer.hardware.machine import PURPOSES, Hardware, is_optional, package_notes
from lora_trainer.queue.rules import is_offline_by_user
from lora_trainer.run.machine_report import clock

from .. import runs
from ..workplace import Workplace


@dataclass(frozen=True, kw_only=True)
class Hub:
    """How downloads from the Hugging Face Hub would go; `is_fixed`: forbidden by who started the program."""

    offline: bool
    is_fixed: bool = False
    token: bool
    folder: Path


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The cache of encoded pictures and captions."""

    folder: CappedFolder
    files: int
    bytes: int


def hub() -> Hub:
    """Look at the settings of huggingface_hub, which it reads once when it is imported."""
    from huggingface_hub import constants, get_token

    return Hub(
        offline=bool(constants.HF_HUB_OFFLINE),
        is_fixed=is_offline_by_user(os.environ),
        token=get_token() is not None,
        folder=Path(constants.HF_HUB_CACHE),
    )


def cache_state() -> CacheState:
    """Measure the cache that trainings use unless they name another one."""
    folder = cache_in(build_config({}).data)
    sizes = [size for _, size in entries(folder)]
    return CacheState(folder=folder, files=len(sizes), bytes=sum(sizes))


def clear_cache(work: Workplace) -> tuple[int, int]:
    """Empty the cache; return the number of entries and their bytes. Raises MachineError while anything trains."""
    running = [run.name for run in runs.find_runs(work.runs) if run.status.state == "running"]
    if running:
        raise MachineError(
            f"the cache is left alone while {running[0]} trains",
            fix="wait for it, or stop it first",
        )
    return clear(cache_state().folder)


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package, and how to get it where it is missing or of an untested version."""

    name: str
    version: str | None
    purpose: str
    why: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder and what is free on its disk, which cannot be read where there is a `fault`."""

    purpose: str
    path: Path
    free_bytes: int
    fault: str
    total_bytes: int = 0


def shown(work: Workplace, found: Hardware, cache: CacheState, links: Hub) -> Mapping[str, Any]:
    """Return what report.html shows of this machine."""
    gpu, reason = found.accelerator()
    packages, kept = list(_packages(found)), keeper()
    return {
        "kept_bytes": 0 if kept is None else kept.gpu_bytes or kept.ram_bytes,
        "found": found,
        "trains": runs.trains(work.runs),
        "gpu": gpu,
        "reason": reason,
        "clock": clock(found, cache.folder.root),
        "packages": packages,
        "wrong": sum(bool(each.command) and not is_optional(each.name) for each in packages),
        "folders": _places(work, cache, links),
        "cache": cache,
        "links": links,
        "versions": list(_versions()),
    }


def _packages(found: Hardware) -> Iterator[Package]:
    notes = package_notes(found.packages)
    for name, found_version in found.packages.items():
        before, _, command = notes.get(name, "").partition("pip install ")
        why = before.rstrip(": ") if not before.startswith("not installed") else ""
        yield Package(
            name=name,
            version=found_version,
            purpose=PURPOSES.get(name, ""),
            why=why,
            command=f"pip install {command}" if name in notes else "",
        )


def _places(work: Workplace, cache: CacheState, links: Hub) -> Sequence[Place]:
    return [
        _place("runs and LoRAs", work.runs),
        _place("cache of pictures and captions", cache.folder.root),
        _place("downloaded models", links.folder),
    ]


def _place(purpose: str, path: Path) -> Place:
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        disk = shutil.disk_usage(existing)
    except (OSError, StopIteration) as error:
        return Place(purpose=purpose, path=path, free_bytes=0, fault=str(error))
    return Place(purpose=purpose, path=path, free_bytes=disk.free, fault="", total_bytes=disk.total)


def _versions() -> Iterator[str]:
    yield f"lora-train {__version__}"
    yield f"Python {platform.python_version()}"
    try:
        yield f"gradio {version('gradio')}"
    except PackageNotFoundError:
        yield "gradio without a version"
    yield f"{platform.system() or sys.platform} {platform.release()}"
