"""What becomes of each key of a foreign settings file, and the settings that come of them.

A key is a setting, is a setting by the nearest that there is, needs none, has no equivalent, or is unknown.
Input: keys and values one by one. Output: `Imported`, in which every key of the file is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_trainer.common.redaction import without_secrets
from lora_trainer.config.config import overlaid, setting_keys, setting_of

OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None")
"""Values with which an option of another trainer does nothing."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Settings by key, where each comes from, and what was not carried over, by the foreign key.

    `trainer` is the program whose file it is. What `data.folders` holds has a source for each of its
    parts. `nearest` says which keys are only approximated, and how. `dataset` is the folder to train on
    as the file has it, None where it names none.
    """

    trainer: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    nearest: Mapping[str, str]
    nothing_to_set: Mapping[str, str]
    without_equivalent: Mapping[str, str]
    unknown: tuple[str, ...]
    dataset: str | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `import --json`."""
        return {
            "trainer": self.trainer,
            "settings": dict(self.values),
            "from": dict(self.sources),
            "nearest": dict(self.nearest),
            "nothing_to_set": dict(self.nothing_to_set),
            "without_equivalent": dict(self.without_equivalent),
            "unknown": list(self.unknown),
            "dataset": self.dataset,
        }


@dataclass(kw_only=True)
class Findings:
    """Collects what becomes of the keys; `named` holds the foreign keys of which something is said."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nearest: dict[str, str] = field(default_factory=dict)
    nothing_to_set: dict[str, str] = field(default_factory=dict)
    without_equivalent: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    dataset: str | None = None
    named: set[str] = field(default_factory=set)

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set one of our settings; `names` are the foreign keys it comes from, `note` says more of them."""
        assert setting_of(key) in setting_keys(), key
        self.values = overlaid(self.values, {key: value})
        self.sources[key] = " ".join(part for part in (" x ".join(names), note) if part)
        self.named.update(names)

    def stays(self, key: str, why: str) -> None:
        """Say that a key needs no setting here."""
        self.nothing_to_set[key] = why
        self.named.add(key)

    def is_nearest(self, key: str, how: str) -> None:
        """Say that a key is only approximated, and how."""
        self.nearest[key] = how
        self.named.add(key)

    def lacks(self, key: str, value: Any, why: str, *, off: tuple[Any, ...] = ()) -> None:
        """Say that a key has no equivalent; one that is off there needs none, `off` has more such values."""
        self.named.add(key)
        if any(type(value) is type(idle) and value == idle for idle in (*OFF, 0.0)):
            self.nothing_to_set[key] = f"is off there ({shown(value)})"
        elif any(type(value) is type(idle) and value == idle for idle in off):
            self.nothing_to_set[key] = f"changes nothing with this value ({shown(value)})"
        else:
            self.without_equivalent[key] = f"{shown(value)}: {why}"

    def done(self, trainer: str, *, called: Mapping[str, str]) -> Imported:
        """Return all of it; `called` has what the file calls a key that is read under another name."""

        def renamed(rows: Mapping[str, str]) -> dict[str, str]:
            return {called.get(key, key): why for key, why in rows.items()}

        sources = {
            key: " ".join(called.get(word, word) for word in source.split(" "))
            for key, source in self.sources.items()
        }
        return Imported(
            trainer=trainer,
            values=self.values,
            sources=sources if called else self.sources,
            nearest=renamed(self.nearest),
            nothing_to_set=renamed(self.nothing_to_set),
            without_equivalent=renamed(self.without_equivalent),
            unknown=tuple(called.get(key, key) for key in self.unknown),
            dataset=self.dataset,
        )


def shown(value: Any) -> str:
    """Return a foreign value as one short line without tokens in it."""
    text = without_secrets(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 120 else f"{text[:117]}..."
