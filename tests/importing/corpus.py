"""Settings files as other trainers write them, made by generators, with the reading that is expected.

A case is named by trainer and version. Each trainer has a usual file in the layout that it writes (keys are
facts of its argument list), and cases that change some keys of it: what must be set then, and which keys
must be named as nearest, missing or unknown. Keys a case does not name must read as in the usual file.
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
    """One file: its trainer and version, how it is written, and what is expected of it.

    `settings` are some of ours with their values, `absent` ones that must not be set. `nearest` and
    `missing` are foreign keys. `refused` is part of the reason for which the file is refused.
    """

    trainer: str
    version: str
    name: str
    suffix: str
    data: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
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
    """Return a copy with values at paths such as `train.lr` or `datasets.0.flip_x` replaced."""
    result: Any = copy.deepcopy(data)
    for path, value in changes.items():
        *parents, last = path.split("/") if "/" in path else [path]
        place = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if value is REMOVED:
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    assert isinstance(result, dict)
    return result


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual file of a trainer and version, from which cases are made."""

    trainer: str
    version: str
    suffix: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    beside: Mapping[str, Any] = field(default_factory=dict)

    def case(
        self,
        name: str,
        changes: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        beside: Mapping[str, Any] | None = None,
        refused: str = "",
        absent: tuple[str, ...] = (),
        nearest: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
    ) -> Case:
        expected = {**self.settings, **(settings or {})}
        return Case(
            trainer=self.trainer, version=self.version, name=name, suffix=self.suffix,
            data=changed(self.data, changes or {}), beside={**self.beside, **(beside or {})},
            settings={} if refused else {k: v for k, v in expected.items() if k not in absent},
            refused=refused, absent=absent, nearest=nearest, missing=missing,
        )  # fmt: skip


def _text(data: Any, suffix: str) -> str:
    writers: Mapping[str, Callable[[Any], str]] = {
        ".json": lambda value: json.dumps(value, indent=2),
        ".yaml": lambda value: yaml.safe_dump(value, sort_keys=False),
        ".toml": lambda value: "\n".join(_toml(value, "")),
        ".txt": str,
    }
    return writers[suffix](data) + "\n"


def _toml(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield a table's lines: plain values first, then tables, then lists of tables."""
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lists = {
        k: v for k, v in table.items() if isinstance(v, list) and v and isinstance(v[0], Mapping)
    }
    for key, value in table.items():
        if key not in tables and key not in lists:
            yield f"{key} = {json.dumps(value)}"
    for key, value in tables.items():
        yield f"[{prefix}{key}]"
        yield from _toml(value, f"{prefix}{key}.")
    for key, values in lists.items():
        for value in values:
            yield f"[[{prefix}{key}]]"
            yield from _toml(value, f"{prefix}{key}.")


def case_id(case: Case) -> str:
    return case.id
