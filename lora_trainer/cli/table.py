"""The table of commands: the function of each, and its line in `--help`.

A command's module is imported only when the command runs, because `--help` would otherwise import
libraries of the queue and the captioners. Its line is read from the source of the module.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

COMMANDS: Mapping[str, str] = {
    "plan": "planning:plan",
    "check": "look_around:check",
    "inspect": "look_around:inspect",
    "convert": "tools:convert",
    "merge": "tools:merge",
    "resize": "tools:resize",
    "extract": "tools:extract",
    "describe": "tools:describe",
    "publish": "tools:publish",
    "caption": "caption:caption",
    "import": "import_settings:import_settings",
    "sample": "make_images:sample",
    "validate": "make_images:validate",
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
