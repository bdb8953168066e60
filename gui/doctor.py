"""What the page Machine says: what this machine trains with, what is missing, where things lie.

Inputs: what `lora-train doctor` finds, the environment, folders. Outputs: escaped markup. No token
is ever read into it, only whether there is one.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lora_trainer import __version__
from lora_trainer.cache.store import clear, entries
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from lora_trainer.common.wording import bytes_text
from lora_trainer.config.config import build_config
from lora_trainer.dataset.scan import cache_in
from lora_trainer.hardware.machine import PURPOSES, Hardware, is_optional, package_notes
from lora_trainer.reporting.charts import Html

from . import state
from .markup import table, tag
from .workplace import Workplace


@dataclass(frozen=True, kw_only=True)
class Hub:
    """How downloads from the Hugging Face Hub would go."""

    offline: bool
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
    running = [run.name for run in state.runs(work.runs) if run.status.state == "running"]
    if running:
        raise MachineError(
            f"the cache is left alone while {running[0]} trains",
            fix="wait for it, or stop it first",
        )
    return clear(cache_state().folder)


def machine(found: Hardware) -> Html:
    """Return what this machine has, in sentences and a table."""
    cards = [
        (
            gpu.name,
            f"{bytes_text(gpu.free_bytes)} free of {bytes_text(gpu.total_bytes)}",
            f"driver {gpu.driver}" if gpu.driver else "",
        )
        for gpu in found.gpus
    ]
    gpu, reason = found.accelerator()
    where = f"Trains on {gpu.name}." if gpu else "Trains on the processor: slow."
    free, total = bytes_text(found.ram_free_bytes), bytes_text(found.ram_total_bytes)
    memory = f"{free} free of {total}, of which plans may use {bytes_text(found.usable_ram_bytes)}"
    cores = f"{found.cpu_threads} core{'' if found.cpu_threads == 1 else 's'} to use"
    return tag(
        "section",
        tag("h2", "Processor and GPU"),
        tag("p", tag("b", where), " ", tag("span", f"({reason})", class_="quiet")),
        table(("part", "memory", ""), [*cards, (found.cpu_name, memory, cores)]),
    )


def packages(found: Hardware) -> Html:
    """Return the packages with what each is for, and how to get those that are missing."""
    notes = package_notes(found.packages)
    wrong = [name for name in notes if not is_optional(name)]
    said = f"{len(wrong)} to be mended, see below." if wrong else "All that is needed is installed."
    rows = (
        (
            name,
            found_version or "not installed",
            PURPOSES.get(name, ""),
            _command(notes[name]) if name in notes else "",
        )
        for name, found_version in found.packages.items()
    )
    return tag(
        "section",
        tag("h2", "Packages"),
        tag("p", said, class_="error" if wrong else None),
        table(("package", "version", "for", "to change it, type in a terminal"), rows),
    )


def _command(note: str) -> Html:
    """Return the note with its command as something to copy."""
    before, _, command = note.partition("pip install ")
    why = before.rstrip(": ") if not before.startswith("not installed") else ""
    return tag("span", f"{why}: " if why else None, tag("code", f"pip install {command}"))


def folders(work: Workplace, cache: CacheState, links: Hub) -> Html:
    """Return where things lie and what is free there."""
    kept = f"{bytes_text(cache.bytes)} in {cache.files:,} entries"
    limit = bytes_text(cache.folder.limit_bytes)
    rows = [
        ("runs and LoRAs", work.runs, ""),
        ("cache of pictures and captions", cache.folder.root, f"{kept}, kept under {limit}"),
        ("downloaded models", links.folder, "managed by huggingface_hub"),
    ]
    shown = ((name, tag("code", str(path)), note, _free(path)) for name, path, note in rows)
    return tag(
        "section",
        tag("h2", "Folders"),
        table(("for", "folder", "holds", "free on its disk"), shown),
    )


def _free(path: Path) -> str:
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        return bytes_text(shutil.disk_usage(existing).free)
    except (OSError, StopIteration) as error:
        return f"cannot be read ({error})"


def network(links: Hub) -> Html:
    """Return whether anything may be downloaded, and whether a login is there."""
    if links.offline:
        offline = "Offline: nothing is downloaded (HF_HUB_OFFLINE is set)."
    else:
        offline = (
            "Base models that are not here are downloaded when a training needs them; "
            "set HF_HUB_OFFLINE=1 before the start to forbid it."
        )
    token = (
        "Signed in to Hugging Face; the token is neither shown nor written to logs."
        if links.token
        else "Not signed in to Hugging Face. Only models with terms to accept need it: choose one on the "
        "page Train, which asks for it."
    )
    return tag("section", tag("h2", "Network"), tag("p", offline), tag("p", token))


def versions() -> Html:
    """Return what to name in a report of a bug."""
    return tag(
        "section",
        tag("h2", "Versions"),
        tag("p", ", ".join(_versions())),
        tag("p", "The same as text for a bug report: ", tag("code", "lora-train doctor")),
    )


def _versions() -> Iterator[str]:
    yield f"lora-train {__version__}"
    yield f"Python {platform.python_version()}"
    try:
        yield f"gradio {version('gradio')}"
    except PackageNotFoundError:
        yield "gradio without a version"
    yield f"{platform.system() or sys.platform} {platform.release()}"


def cleared_text(count: int, size_bytes: int) -> str:
    """Return what clearing the cache has freed."""
    return f"Removed {count:,} entries: {bytes_text(size_bytes)} are free again."


def question(cache: CacheState) -> str:
    """Return what is asked before the cache is cleared."""
    if not cache.files:
        return "The cache is empty already."
    return (
        f"Remove {cache.files:,} entries, {bytes_text(cache.bytes)}? Nothing of yours is in it; the "
        "next training encodes its pictures and captions again, which takes a while."
    )
