"""The registry: family name -> module, imported on demand. Adding a family adds one line here."""

from __future__ import annotations

import importlib
from pathlib import Path

from lora_trainer.errors import InputError
from lora_trainer.families.base import BaseFacts, Family

MODULES = {
    "sd15": "lora_trainer.families.sd15",
}
DEFAULT_FAMILY = "sd15"


def family(name: str) -> Family:
    """Return the family of that name; raises KeyError for an unregistered one."""
    found = importlib.import_module(MODULES[name]).FAMILY
    assert isinstance(found, Family)
    return found


def known_base(source: str) -> BaseFacts | None:
    """Return facts of a well-known Hub id by name alone, else None."""
    return next((facts for name in MODULES if (facts := family(name).known(source))), None)


def detect(folder: Path) -> Family:
    """Return the family of a diffusers folder; raises InputError saying what was found there."""
    for name in MODULES:
        if family(name).detect(folder):
            return family(name)
    inside = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else []
    raise InputError(
        f"{folder} is not a base model of a supported family ({', '.join(MODULES)}); it holds {inside or 'nothing'}",
        fix="give a diffusers folder (model_index.json, unet/, vae/, text_encoder/, tokenizer/, scheduler/)",
    )
