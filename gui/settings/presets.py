"""Settings that somebody keeps under a name, to use them again: `<runs>/.gui/presets/NAME.json`.

Inputs: {"section.name": value}, a name. Outputs: settings files that the interface lists and that
`--preset FILE` and `--config FILE` read on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import disk_error, write_atomic

from ..command_lines import run_name
from ..setting_edit import as_json
from ..workplace import Workplace

_SUFFIX = ".json"


class Taken(RequestError):
    """A preset has that name already."""


def names(work: Workplace) -> list[str]:
    """Return the names of what is saved, in alphabetical order."""
    return sorted(file.stem for file in _folder(work).glob(f"*{_SUFFIX}") if file.is_file())


def save(work: Workplace, values: Mapping[str, Any], *, name: str, over: bool = False) -> Path:
    """Write settings under a name, `over` those that have it; raises Taken, RequestError, MachineError."""
    if not values:
        raise RequestError(
            "nothing is changed, so there is nothing to save", fix="change a setting"
        )
    file = _file(work, name)
    if file.exists() and not over:
        raise Taken(f"there is a preset {file.stem!r}", fix="replace it or choose a name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file.parent, error) from error
    write_atomic(file, as_json(values).encode(), durable=False)
    return file


def text(work: Workplace, *, name: str) -> str:
    """Return what is saved under a name, as text; raises RequestError."""
    file = _file(work, name)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the preset {file.stem!r} cannot be read: {error}", fix="save it again"
        ) from None


def _folder(work: Workplace) -> Path:
    return work.own / "presets"


def _file(work: Workplace, name: str) -> Path:
    checked = run_name(name)
    if not checked:
        raise RequestError("the preset has no name", fix="type one")
    return _folder(work) / f"{checked}{_SUFFIX}"
