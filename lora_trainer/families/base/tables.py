"""What the folders of the families say: family.toml, written by hand, and tables.json, which a command makes.

The registry is the listing of the folders. Torch-free.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FAMILIES = Path(__file__).resolve().parents[1]


@cache
def family_names() -> tuple[str, ...]:
    """Return the names of the families, which are those of the folders with a family.toml, by their `place`."""
    folders = [file.parent.name for file in FAMILIES.glob("*/family.toml")]
    return tuple(sorted(folders, key=lambda name: (head(name)["place"], name)))


@cache
def head(family: str) -> Mapping[str, Any]:
    """Return the values at the top of a family.toml, before its first table; reading them is quick."""
    values: Mapping[str, Any] = tomllib.loads(_text(family).partition("\n[")[0])
    return values


@cache
def family_table(family: str) -> Mapping[str, Any]:
    """Return the contents of a family's family.toml."""
    table: Mapping[str, Any] = tomllib.loads(_text(family))
    return table


def is_trained_on_tags(source: str) -> bool:
    """Return whether a folder, file or Hub id has the name of a release or fine-tune whose captions were tags."""
    patterns = (family_table(family)["stated"].get("tags") for family in family_names())
    return any(re.search(pattern, Path(source).name) for pattern in patterns if pattern)


def _text(family: str) -> str:
    return (FAMILIES / family / "family.toml").read_text(encoding="utf-8")


def made_file(family: str) -> Path:
    """Return the file of a family's made tables: `layers` of its releases, and `costs` of training them."""
    return FAMILIES / family / "tables.json"


@cache
def made_tables(family: str) -> Mapping[str, Any]:
    """Return the contents of tables.json; empty for a family whose tables are not made yet, or an unknown one."""
    file = made_file(family)
    tables: Mapping[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return tables
