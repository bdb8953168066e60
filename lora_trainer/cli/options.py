"""Options that several commands share, the settings typed on the command line, and a command's answer.

Inputs: words of the command line. Outputs: settings by key, and answers that `cli` prints. `--help` imports
this module, so it imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from lora_trainer.common.errors import RequestError
from lora_trainer.config.choices import Concept, Priority

Sets = Annotated[
    list[str], Parameter(name="--set", negative="", help="section.key=value, repeatable")
]
Base = Annotated[
    str | None,
    Parameter(
        help="`embedded`, a diffusers folder, a .safetensors checkpoint or a Hub id "
        "[default: by hardware]"
    ),
]
Preset = Annotated[
    str, Parameter(help="auto, a tier such as 10-12, or a settings file (JSON, TOML)")
]
Priorities = Annotated[
    Priority, Parameter(help="what to prefer if not everything fits: quality, speed or a balance")
]
Kind = Annotated[
    Concept | None,
    Parameter(help="kind of concept the images show; decides some presets [default: any]"),
]
ConfigFile = Annotated[
    Path | None,
    Parameter(name="--config", help="settings file (JSON, TOML) that overrides the preset"),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="machine-readable output")]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a command: text or a rich renderable, or the value to print as JSON."""

    value: Any
    as_json: bool


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup and emoji codes: names and captions are printed unchanged."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False)


def overrides(assignments: Sequence[str], **flags: Any) -> dict[str, Any]:
    """Return the settings typed on the command line; a flag is a short name of its setting.

    Raises RequestError for an unknown setting, and for one that is given twice with different values.
    """
    from lora_trainer.config.config import parse_assignment

    keys = {
        "base": "base.model", "output": "output.folder", "name": "output.name", "steps": "train.steps",
        "seed": "train.seed", "kind": "train.concept",
    }  # fmt: skip
    typed = {
        keys[flag]: str(value) if isinstance(value, Path) else value
        for flag, value in flags.items()
        if value is not None
    }
    for text in assignments:
        key, value = parse_assignment(text)
        if key in typed and typed[key] != value:
            raise RequestError(
                f"{key} is given twice: {typed[key]} and {value}", fix="give it once"
            )
        typed[key] = value
    return typed
