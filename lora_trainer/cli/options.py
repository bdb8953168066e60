"""What several commands have in common: their options, the settings typed, and how they answer.

Inputs: words of the command line. Outputs: settings by key, and answers that `cli` prints. Imports
nothing heavy, because `--help` needs all of it.
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
Priorities = Annotated[Priority, Parameter(help="what to prefer where something must give")]
Kind = Annotated[
    Concept | None,
    Parameter(help="what the pictures are to teach; settles some presets [default: any]"),
]
ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="settings file (JSON, TOML) over the preset")
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="machine-readable output")]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a command says: text, or the value of its JSON."""

    value: Any
    as_json: bool


def console(*, stderr: bool = False) -> Console:
    """Return where to print: without markup, since names and captions are shown as they are."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False)


def overrides(assignments: Sequence[str], **flags: Any) -> dict[str, Any]:
    """Return the settings typed on this command line; a flag is a short name of its setting.

    Raises RequestError for a word that is no setting, and for one that is given twice.
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
