"""What becomes of each key of a foreign settings file: a setting, nothing to do, no equivalent, unknown.

Input: keys and values one by one. Output: `Imported`, in which every key of the file is named once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_trainer.config import overlaid, setting_keys, setting_of


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Settings by key, where each comes from, and what was not carried over, by the foreign key.

    What `data.folders` holds has a source for each of its parts.
    `dataset` is the folder to train on as the file has it, None where it names none.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    nothing_to_set: Mapping[str, str]
    without_equivalent: Mapping[str, str]
    unknown: tuple[str, ...]
    dataset: str | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `import --json`."""
        return {
            "settings": dict(self.values),
            "from": dict(self.sources),
            "nothing_to_set": dict(self.nothing_to_set),
            "without_equivalent": dict(self.without_equivalent),
            "unknown": list(self.unknown),
            "dataset": self.dataset,
        }


@dataclass(kw_only=True)
class Findings:
    """Collects what becomes of the keys."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nothing_to_set: dict[str, str] = field(default_factory=dict)
    without_equivalent: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    dataset: str | None = None

    def set(self, key: str, value: Any, source: str) -> None:
        """Set one of our settings; `source` is the foreign key, or says why it is set."""
        assert setting_of(key) in setting_keys(), key
        self.values = overlaid(self.values, {key: value})
        self.sources[key] = source

    def stays(self, key: str, why: str) -> None:
        """Say that a key needs no setting here."""
        self.nothing_to_set[key] = why

    def lacks(self, key: str, value: Any, why: str) -> None:
        """Say that a key has no equivalent; one that is off there needs none."""
        if value in (False, None, 0, "", [], {}):
            self.nothing_to_set[key] = f"is off ({_shown(value)})"
        else:
            self.without_equivalent[key] = f"{_shown(value)}: {why}"

    def names(self, key: str) -> bool:
        """Say whether anything is said of a foreign key by now."""
        said = (*self.sources.values(), *self.nothing_to_set, *self.without_equivalent)
        return any(key in re.findall(r"\w+", text) for text in said)

    def done(self) -> Imported:
        """Return all of it."""
        return Imported(
            values=self.values,
            sources=self.sources,
            nothing_to_set=self.nothing_to_set,
            without_equivalent=self.without_equivalent,
            unknown=tuple(self.unknown),
            dataset=self.dataset,
        )


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
