"""Writes tables.json of a family: `layers` of its releases, `costs` of training them, each by its own script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.families.base.tables import made_file, made_tables


def write_made(family: str, **changed: Any) -> None:
    """Write the file anew, with `layers` or `costs` in place of those that it has."""
    tables = {**made_tables(family), **changed}
    made_file(family).write_text(text_of(tables), encoding="utf-8")
    made_tables.cache_clear()


def text_of(tables: Mapping[str, Any]) -> str:
    """Return the text of a tables.json: a row of layers a line, costs as `_written` has them.

    A new family has layers first: a plan, and the script that traces costs, then find no key for them.
    """
    layers: Sequence[Any] = tables.get("layers", ())
    rows = json.dumps(layers, separators=(",", ":")).replace("]],[", "]],\n[")
    costs = f',\n"costs": {_written(tables["costs"])}' if "costs" in tables else ""
    return f'{{"layers":{rows}{costs}}}\n'


def _written(value: Any, depth: int = 0) -> str:
    """Return JSON with mappings over several lines and lists in one."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = "\n" + " " * (depth + 1)
    items = (
        f"{inner}{json.dumps(key)}: {_written(item, depth + 1)}" for key, item in value.items()
    )
    return "{" + ",".join(items) + "\n" + " " * depth + "}"
