"""The base models that lie on this machine already, each with the kind that its header tells.

Inputs: folders (model_folders.py) and the Hub's cache. Outputs: what can be trained on, and why anything else
cannot. Only headers are read, once for each file: what they told is remembered by size and time of change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from lora_trainer import __version__, families
from lora_trainer.common.errors import InputError, MachineError, first_line
from lora_trainer.common.files import user_cache_folder
from lora_trainer.common.memo import MemoTable
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.tables import head
from lora_trainer.families.files.hub_files import SUFFIXES, checkpoint_in, index_in
from lora_trainer.families.files.model_folders import HUB_CACHE, ModelFolder
from lora_trainer.families.files.single_files import open_checkpoint
from lora_trainer.families.files.weight_files import read_header

Verdict = Literal["base", "other", "broken"]
# Files that some programs take for checkpoints; a pickle is never opened.
_PICKLED = ".ckpt"
_DEPTH = 5
MAX_FILES = 5_000


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A file or folder that may be a base model."""

    source: str
    """What `--base` takes: its path, or its id in the Hub's cache."""
    program: str
    verdict: Verdict
    size_bytes: int
    family: str = ""
    kind: str = ""
    """The title of its family."""
    like: str = ""
    """The public release that it is made like, "" where its files do not tell."""
    why: str = ""
    """Why it cannot be trained on."""

    @property
    def name(self) -> str:
        """Return the name of its file or folder without the ending, or its id."""
        path = Path(self.source)
        return path.stem if path.suffix in (*SUFFIXES, _PICKLED) else path.name


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found, bases first, and whether there are more files than are looked at."""

    models: tuple[FoundModel, ...]
    is_cut: bool = False


def found_models(
    folders: Iterable[ModelFolder],
    *,
    hub_cache: Path | None = None,
    memo: MemoTable | None = None,
    max_files: int = MAX_FILES,
) -> Found:
    """Return the models in these folders and in the Hub's cache; raises nothing for what cannot be read."""
    if memo is None:
        memo = MemoTable.load(user_cache_folder(), "models", version=__version__)
    found: dict[str, FoundModel] = {}
    is_cut = False
    for program, source, path in _everything(folders, hub_cache):
        if str(path) in found:
            continue
        if len(found) >= max_files:
            is_cut = True
            break
        model = _recognised(path, source=source, program=program, memo=memo)
        if model is not None:
            found[str(path)] = model
    with suppress(MachineError):  # a full disk: the headers are read once more next time
        memo.save()
    order = {"base": 0, "broken": 1, "other": 2}
    models = sorted(found.values(), key=lambda each: (order[each.verdict], each.name.casefold()))
    return Found(models=tuple(models), is_cut=is_cut)


def _everything(
    folders: Iterable[ModelFolder], hub_cache: Path | None
) -> Iterator[tuple[str, str, Path]]:
    """Yield program, source and place of each file and whole model."""
    seen: set[str] = set()
    for folder in folders:
        for path in _inside(Path(os.path.realpath(folder.path)), seen, depth=_DEPTH):
            yield folder.program, str(path), path
    for repository in sorted(hub_cache.glob("models--*")) if hub_cache else ():
        snapshot = _snapshot(repository)
        if snapshot is not None:
            yield HUB_CACHE, repository.name.removeprefix("models--").replace("--", "/"), snapshot


def _inside(folder: Path, seen: set[str], *, depth: int) -> Iterator[Path]:
    """Yield model files and folders of whole models; a folder that links lead to twice comes once."""
    if str(folder) in seen:
        return
    seen.add(str(folder))
    if index_in(folder) is not None:
        yield folder
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name.casefold())
    except OSError:  # may not be read
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = Path(os.path.realpath(entry.path))
        with suppress(OSError):
            if entry.is_dir():
                if depth > 1:
                    yield from _inside(path, seen, depth=depth - 1)
            elif Path(entry.name).suffix in (*SUFFIXES, _PICKLED):
                yield path


def _snapshot(repository: Path) -> Path | None:
    """Return the folder of a repository's newest snapshot that can be a base, None for any other repository."""
    snapshots = sorted(
        (path for path in (repository / "snapshots").glob("*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    for folder in reversed(snapshots):
        with suppress(InputError):  # several checkpoints: --base would not know which is meant
            if index_in(folder) is not None or checkpoint_in(folder) is not None:
                return folder
    return None


def _recognised(path: Path, *, source: str, program: str, memo: MemoTable) -> FoundModel | None:
    """Return what a file or folder is, as it was remembered where it has not changed; None once it is gone."""
    try:
        stamp = _stamp(path)
    except OSError:
        return None
    kept = memo.get(str(path))
    if kept is not None:
        row = json.loads(kept)
        if row.pop("stamp") == stamp:
            return replace(FoundModel(**row), source=source, program=program)
    look: Callable[[Path], FoundModel] = _folder if path.is_dir() else _file
    model = look(path)
    memo.put(str(path), json.dumps({**asdict(model), "stamp": stamp}))
    return replace(model, source=source, program=program)


def _stamp(path: Path) -> list[int]:
    """Return what changes with a file, or with the weights and configurations of a folder."""
    files = _files(path)
    status = [file.stat() for file in files]
    return [sum(each.st_size for each in status), max((s.st_mtime_ns for s in status), default=0)]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [
        file for file in path.rglob("*") if file.is_file() and file.suffix in (*SUFFIXES, ".json")
    ]


def _file(path: Path) -> FoundModel:
    """Return what a single file is, by its header."""
    size_bytes = path.stat().st_size
    plain = FoundModel(source=str(path), program="", verdict="other", size_bytes=size_bytes)
    if path.suffix == _PICKLED:
        why = "is a pickle, which can run code when opened: take its safetensors version"
        return replace(plain, why=why)
    try:
        read_header(path)
    except InputError as error:
        return replace(plain, verdict="broken", why=_why(error, path))
    try:
        checkpoint = open_checkpoint(BaseSettings(model=str(path)), path)
        like = checkpoint.own_facts.source
    except (InputError, MachineError) as error:
        return replace(plain, why=_why(error, path))
    return _base(plain, family=checkpoint.family.name, like=like)


def _folder(path: Path) -> FoundModel:
    """Return what a diffusers folder, or a snapshot of one checkpoint, is."""
    only = checkpoint_in(path)
    if only is not None:
        return _file(only)
    size_bytes = sum(file.stat().st_size for file in _files(path))
    plain = FoundModel(source=str(path), program="", verdict="other", size_bytes=size_bytes)
    try:
        return _base(plain, family=families.detect(path).name, like="")
    # A config.json may hold any JSON, and what reads it may fail in any of these ways.
    except (
        InputError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, OSError,
    ) as error:  # fmt: skip
        return replace(plain, why=_why(error, path))


def _base(plain: FoundModel, *, family: str, like: str) -> FoundModel:
    return replace(plain, verdict="base", family=family, kind=head(family)["name"], like=like)


def _why(error: Exception, path: Path) -> str:
    """Return what an error found, without the file, which stands beside it."""
    found = error.found if isinstance(error, InputError | MachineError) else first_line(error)
    return found.replace(str(path), "").replace(path.name, "").strip()
