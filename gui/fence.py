"""Which files and folders the settings of a draft name: absolute, and inside of what this server may name.

Inputs: settings by `section.name`. Which of them are paths is said where they are declared, and so is which may
be a repository on the Hub instead. Output: the settings with absolute paths; InputError for one outside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.config.config import SettingInfo, all_settings
from lora_trainer.config.inputs import MINIATURES

from .workplace import Workplace

_NO_PATH = ("", "auto", *MINIATURES)
# A repository, or a file in it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:/[\w-][\w.-]*\.safetensors)?")


def fenced(settings: Mapping[str, Any], work: Workplace) -> dict[str, Any]:
    """Return settings whose paths are absolute; raises InputError for one outside of the fence.

    Somebody alone at the machine has no fence: the trainer reads what was typed as it does in a terminal.
    """
    if work.roots is None:
        return dict(settings)
    paths = {info.key: info for info in all_settings() if info.path}
    return {
        key: _absolute(paths[key], value, work) if key in paths else value
        for key, value in settings.items()
    }


def _absolute(info: SettingInfo, value: Any, work: Workplace) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(info, part, work) for part in value]
    if not isinstance(value, str) or value.strip() in _NO_PATH or is_on_hub(info, value):
        return value
    return str(work.path(value, what=f"a file or folder for {info.key}"))


def is_on_hub(info: SettingInfo, text: str) -> bool:
    """Whether a value names a repository on the Hub: it may, reads as one, and no such file is here."""
    return info.hub and _HUB_ID.fullmatch(text.strip()) is not None and not _is_here(text.strip())


def _is_here(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long a name: to be refused as a path
        return True
