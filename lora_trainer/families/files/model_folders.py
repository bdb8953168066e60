"""The folders in which other programs keep base models on this machine.

Inputs: the places in model_folders.toml, the home folder, the environment, and the settings in which ComfyUI and
StabilityMatrix name further folders. Output: folders that exist, each with the program it belongs to. Nothing is
looked for outside of these places.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import read_json_object

HUB_CACHE = "Hugging Face"
NAMED = ""
"""The program of a folder that somebody named."""
# Below the folder of a program, or of its LoRAs, lies all that it has: checkpoints beside them.
_LORA_FOLDER = re.compile(r"loras?", re.IGNORECASE)
_VARIABLE = re.compile(r"%(\w+)%")
_SETTINGS_MAX_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder with base models, and the program that it is of."""

    path: Path
    program: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Whose folders are looked for: the platform as `sys.platform` says it, the home folder, the environment."""

    platform: str
    home: Path
    environment: Mapping[str, str]

    @classmethod
    def this(cls) -> Machine:
        """Return the machine that this program runs on, for the user it runs as."""
        return cls(platform=sys.platform, home=Path.home(), environment=os.environ)

    def path(self, text: str) -> Path | None:
        """Return a path of the table; None where it names a variable that is not set."""
        names = _VARIABLE.findall(text)
        if any(not self.environment.get(name) for name in names):
            return None
        filled = _VARIABLE.sub(lambda found: self.environment[found[1]], text)
        return self.home / filled[2:] if filled.startswith("~/") else self._absolute(filled)

    def _absolute(self, text: str) -> Path:
        return self.home if text == "~" else Path(text)


def model_folders(
    named: Iterable[Path] = (), *, machine: Machine | None = None
) -> tuple[ModelFolder, ...]:
    """Return the folders of this machine that may hold base models; those that somebody `named` come first."""
    machine = machine or Machine.this()
    found: dict[Path, ModelFolder] = {}
    for folder in _candidates(named, machine):
        with suppress(OSError):  # not readable, a drive without a disk
            if folder.path.is_dir():
                found.setdefault(Path(os.path.realpath(folder.path)), folder)
    return tuple(found.values())


def _candidates(named: Iterable[Path], machine: Machine) -> Iterator[ModelFolder]:
    for path in named:
        yield from _of_named(path)
    for program in table()["programs"]:
        for root in _roots(program, machine):
            for below in program["models"]:
                yield ModelFolder(path=root / below, program=program["name"])
            yield from _extra_paths(root / table()["extra_paths"]["beside"], machine)
    for text in table()["extra_paths"]["files"]:
        file = machine.path(text)
        if file is not None:
            yield from _extra_paths(file, machine)


def _of_named(path: Path) -> Iterator[ModelFolder]:
    """Yield the folders of models of a folder that may be a program's own, its models' or that of its LoRAs."""
    if _LORA_FOLDER.fullmatch(path.name):
        path = path.parent
    for program in table()["programs"]:
        below = [Path(text) for text in program["models"]]
        tries = [path / part for whole in below for part in (whole, whole.name)]
        inside = [folder for folder in dict.fromkeys(tries) if folder.is_dir()]
        if inside:
            yield from (ModelFolder(path=folder, program=NAMED) for folder in inside)
            return
    yield ModelFolder(path=path, program=NAMED)


def _roots(program: Mapping[str, Any], machine: Machine) -> Iterator[Path]:
    """Yield where a program may lie: as its settings say, else in one of the usual places."""
    settings = program.get("settings", {"file": []})
    for text in settings["file"]:
        file = machine.path(text)
        if file is not None and file.is_file():
            with suppress(RequestError):  # of another version, or half written
                root = read_json_object(file).get(settings["key"])
                if isinstance(root, str) and root:
                    yield Path(root)
            yield file.parent
    platform = machine.platform if machine.platform in table()["parents"] else "linux"
    for parent_text in table()["parents"][platform]:
        parent = machine.path(parent_text)
        if parent is not None:
            yield from (parent / folder for folder in program["folders"])


def _extra_paths(file: Path, machine: Machine) -> Iterator[ModelFolder]:
    """Yield the folders that a file of ComfyUI lists: groups of kinds, each with a base folder."""
    extra = table()["extra_paths"]
    try:
        if file.stat().st_size > _SETTINGS_MAX_BYTES:
            return
        groups = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return  # none, or one that ComfyUI cannot read either
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict):
            continue
        base = machine.path(str(group.get("base_path", ".")).replace("\\", "/")) or Path()
        for key in extra["keys"]:
            for line in str(group.get(key) or "").splitlines():
                if line.strip():
                    folder = file.parent / base / line.strip().replace("\\", "/")
                    yield ModelFolder(path=folder, program=extra["name"])


@cache
def table() -> Mapping[str, Any]:
    """Return the contents of model_folders.toml."""
    text = Path(__file__).with_name("model_folders.toml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = tomllib.loads(text)
    return found
