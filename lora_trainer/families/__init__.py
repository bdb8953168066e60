"""The registry: families by name, each a folder here, imported on demand.

A folder with a family.toml is a family; base/ and files/ serve all of them. docs/adding-a-family.md says what
a family's folder holds.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import Header, Part
from lora_trainer.families.base.tables import family_names

NAMES = family_names()
DEFAULT_FAMILY = NAMES[0]


def family(name: str) -> Family:
    """Return the family of that name; raises KeyError for an unregistered name."""
    if name not in NAMES:
        raise KeyError(name)
    instance = importlib.import_module(f"{__name__}.{name}.family").FAMILY
    assert isinstance(instance, Family)
    return instance


def known_base(source: str) -> BaseFacts | None:
    """Return facts of a well-known Hub id by name alone, else None."""
    return next((facts for name in NAMES if (facts := family(name).releases.get(source))), None)


def editing() -> list[str]:
    """Return the names of the families with bases that read reference images."""
    return [name for name in NAMES if family(name).edits]


def detect(folder: Path) -> Family:
    """Return the family of a diffusers folder; raises InputError that lists the folder's contents."""
    for name in NAMES:
        if family(name).detect(folder):
            return family(name)
    inside = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else []
    raise InputError(
        f"{folder} is not a base model of a supported family ({', '.join(NAMES)}); it holds {inside or 'nothing'}",
        fix="give a diffusers folder (with model_index.json) or a .safetensors checkpoint",
    )


def detect_file(header: Header) -> tuple[Family, frozenset[Part]] | None:
    """Return the family of a single-file checkpoint with a denoiser, and the parts it holds."""
    for name in NAMES:
        parts = family(name).detect_file(header)
        if "denoiser" in parts:
            return family(name), parts
    return None
