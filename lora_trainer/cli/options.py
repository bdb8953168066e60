"""The table of commands, the options that several share, and the settings typed on the command line.

Inputs: words of the command line. Outputs: settings by key, and requests for a plan. `--help` imports
this module, so it imports nothing slow: a command's own module is imported only when the command runs, and its line
in `--help` is read from the source of that module.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, RenderableType

from lora_trainer.common.errors import RequestError
from lora_trainer.config.declare import Concept, Priority

Reply = RenderableType | dict[str, Any] | list[dict[str, Any]] | None
"""The answer of a command: text or a rich renderable, or a dict or list that is printed as JSON."""
Sets = Annotated[list[str], Parameter(name="--set", help="section.key=value, repeatable")]
Base = Annotated[
    str | None,
    Parameter(
        help="`embedded`, a diffusers folder, a .safetensors checkpoint or a Hub id "
        "[default: by hardware]"
    ),
]
Kind = Annotated[
    Concept | None,
    Parameter(help="kind of concept the images show; decides some presets [default: any]"),
]
Json = Annotated[bool, Parameter(name="--json", help="machine-readable output")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options by which a training is planned; `settings` are those typed, by key.

    :param preset: auto, a tier such as 10-12, or a settings file (JSON, TOML)
    :param priority: what to prefer if not everything fits: quality, speed or a balance
    :param config: settings file (JSON, TOML) that overrides the preset
    """

    preset: str = "auto"
    priority: Priority = "balanced"
    base: Base = None
    config: Path | None = None
    set_: Sets = field(default_factory=list)

    def keywords(self, **flags: Any) -> dict[str, Any]:
        """Return the arguments of `api.plan` and `api.train`; `flags` are short names of settings."""
        return {
            "preset": self.preset,
            "priority": self.priority,
            "config_file": self.config,
            "settings": overrides(self.set_, base=self.base, **flags),
        }


PLANNED = PlanOptions()


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


COMMANDS: Mapping[str, str] = {
    "plan": "train_dataset:plan",
    "check": "look_around:check",
    "inspect": "look_around:inspect",
    "convert": "tools:convert",
    "merge": "tools:merge",
    "resize": "tools:resize",
    "extract": "tools:extract",
    "describe": "tools:describe",
    "publish": "tools:publish",
    "caption": "caption:caption",
    "import": "look_around:import_settings",
    "sample": "measure:sample",
    "validate": "measure:validate",
    "profile": "measure:profile",
    "bench": "measure:bench",
    "presets": "look_around:presets",
    "doctor": "look_around:doctor",
    "gui": "look_around:gui",
    "queue": "queueing:app",
}
"""The module of each command in this folder, and its function there or, of several commands, its `app`."""


def help_line(command: str) -> str:
    """Return the first line of the docstring of a command's function, or of the module of its app."""
    module, _, name = COMMANDS[command].partition(":")
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    docstring = ast.get_docstring(functions.get(name, tree)) or ""
    return docstring.partition("\n")[0]
