"""Settings files as other trainers write them, made by generators.

A case is named by trainer and version. Each trainer has a usual file in the layout that it writes (keys are
facts of its argument list), and cases that change some keys of it. How each is read lies in `readings.json`:
whole for the first case of a usual file, of the others what is different.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REMOVED = object()
"""As a change: the key is left out of the file."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One file: its trainer and version, how it is written.

    `refused` is part of the reason for which the file is refused.
    """

    trainer: str
    version: str
    name: str
    suffix: str
    data: Any
    refused: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.trainer}-{self.version}-{self.name}".replace(" ", "_")

    def write(self, folder: Path) -> Path:
        """Write the file and those beside it; return the file."""
        for name, data in self.beside.items():
            (folder / name).write_text(_text(data, Path(name).suffix), encoding="utf-8")
        file = folder / f"{self.name.replace(' ', '_')}{self.suffix}"
        file.write_text(_text(self.data, self.suffix), encoding="utf-8")
        return file


def changed(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with values at paths such as `train/lr` or `datasets/0/flip_x` replaced."""
    result: Any = copy.deepcopy(data)
    for path, value in changes.items():
        *parents, last = path.split("/")
        place = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if value is REMOVED:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = value
    assert isinstance(result, dict)
    return result


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual file of a trainer and version, from which cases are made."""

    trainer: str
    version: str
    suffix: str
    data: Mapping[str, Any]
    beside: Mapping[str, Any] = field(default_factory=dict)

    def case(
        self,
        name: str,
        changes: Mapping[str, Any] | None = None,
        *,
        beside: Mapping[str, Any] | None = None,
        refused: str = "",
    ) -> Case:
        parts = {**vars(self), "beside": {**self.beside, **(beside or {})}}
        parts["data"] = changed(self.data, changes or {})
        return Case(**parts, name=name, refused=refused)


def _text(data: Any, suffix: str) -> str:
    writers: Mapping[str, Callable[[Any], str]] = {
        ".json": lambda value: json.dumps(value, indent=2),
        ".yaml": lambda value: yaml.safe_dump(value, sort_keys=False),
        ".toml": lambda value: "\n".join(_toml(value, "")),
    }
    return writers[suffix](data) + "\n"


def _toml(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield a table's lines: plain values first, then tables, then lists of tables."""
    later: list[str] = []
    for key, value in table.items():
        name, is_list = f"{prefix}{key}", isinstance(value, list)
        if isinstance(value, Mapping):
            later += [f"[{name}]", *_toml(value, f"{name}.")]
        elif is_list and value and isinstance(value[0], Mapping):
            later += [line for one in value for line in (f"[[{name}]]", *_toml(one, f"{name}."))]
        else:
            yield f"{key} = {json.dumps(value)}"
    yield from later
