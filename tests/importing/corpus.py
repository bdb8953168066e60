"""Settings files as other trainers write them: `corpus/TRAINER/VERSION/`, each a usual file and its variants.

`usual.*` is in the layout that the trainer writes, with the further files that it names beside it. A row of
`variants.yaml` is a case: `changes` of the usual file by path (`train/lr`, `datasets/0/flip_x`), keys that are
`removed`, other files `beside`, and part of the reason for which it is `refused`. How each is read lies in
`readings.json`: whole for the first case of a usual file, of the others what is different.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CORPUS = Path(__file__).with_name("corpus")
PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": lambda text: yaml.load(text, yaml.CSafeLoader),  # as safe_load, ten times as fast
    ".toml": tomllib.loads,
}
WRITERS: Mapping[str, Callable[[Any], str]] = {
    ".json": lambda value: json.dumps(value, indent=2),
    ".yaml": lambda value: str(yaml.safe_dump(value, sort_keys=False)),
    ".toml": lambda value: "\n".join(_toml(value, "")),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One file: its trainer and version, how it is written, why it is refused if it is."""

    trainer: str
    version: str
    name: str
    suffix: str
    data: Any
    beside: Mapping[str, Any]
    refused: str = ""

    @property
    def id(self) -> str:
        return f"{self.trainer}-{self.version}-{self.name}".replace(" ", "_")

    def write(self, folder: Path) -> Path:
        """Write the file and those beside it; return the file."""
        file = folder / f"{self.name.replace(' ', '_')}{self.suffix}"
        data_by_file = {folder / name: data for name, data in self.beside.items()}
        for path, data in {**data_by_file, file: self.data}.items():
            path.write_text(WRITERS[path.suffix](data) + "\n", encoding="utf-8")
        return file


def _cases() -> Iterator[Case]:
    for folder in sorted(path.parent for path in CORPUS.glob("*/*/variants.yaml")):
        files = {file: PARSERS[file.suffix](file.read_text("utf-8")) for file in folder.iterdir()}
        variants = files.pop(folder / "variants.yaml")
        usual = next(file for file in files if file.stem == "usual")
        data = files.pop(usual)
        beside = {file.name: one for file, one in files.items()}
        at = variants.get(".at", "")
        for name, row in variants.items():
            if name.startswith("."):
                continue
            yield Case(
                trainer=folder.parent.name,
                version=folder.name,
                name=name,
                suffix=usual.suffix,
                data=_changed(data, at, row.get("changes", {}), row.get("removed", [])),
                beside={**beside, **row.get("beside", {})},
                refused=row.get("refused", ""),
            )


def _changed(data: Any, at: str, changes: Mapping[str, Any], removed: list[str]) -> Any:
    result = copy.deepcopy(data)
    for path in [*changes, *removed]:
        *parents, last = f"{at}{path}".split("/")
        place = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if path in removed:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = copy.deepcopy(changes[path])
    return result


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


ALL = list(_cases())
CASES = [case for case in ALL if case.version not in ("sections", "tables", "few")]
"""Those that the trainers' own code reads: the others have odd or unknown keys."""
