"""The table of a trainer, which says of each of its keys what becomes of it, and the engine that applies it.

A table is a TOML file in `trainers/`; a trainer may have several, of which later ones win. In it:

`[carried]`: key = our setting, or a table with `setting`, `default` (what the trainer does without the key) and
`values` (what its values mean, "*" for any other).
`[[read]]`: keys that the trainer's own function reads, and why one of which it says nothing needs no setting.
`[[nothing_to_set]]`, `[[no_equivalent]]`, `[[refused]]`: keys, and why. `off` has values that change nothing.
`set`: rows that say what becomes of a key that is on, each a table with `key` and `to`, our setting. `is` is the
value to set and `values` what words mean, others being left alone; `how` says that it is only approximated, `lacks`
why it has no equivalent. A row with `default` counts without its key, too. It is for one kind of base, `noise` or
`flow`, or of adapter, where it says `for`; for some words of the key (`only`) or all but some (`unless`); while a
further key is on (`beside`), or further keys have one of some values (`when`). The first row of a setting wins.

Lists have `keys`, parted by blanks, and `under`, what stands before them. Further tables are looked up by the
trainer's function.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from lora_trainer.importing.foreign import OFF, THERE, Foreign, Reader, is_one_of

KINDS = ("read", "nothing_to_set", "no_equivalent", "refused")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """What becomes of a key: its kind, `carried` or one of `KINDS`, and why.

    `setting` is ours where it is carried over, `read` turns its value into ours, `default` is its value
    where it is missing. With a value in `off` it changes nothing.
    """

    kind: str
    why: str = ""
    off: tuple[Any, ...] = ()
    setting: str = ""
    read: Reader | None = None
    default: Any = None


@dataclass(frozen=True)
class Trainer:
    """One trainer: its name, its tables' names, how its files are told from others', what needs several keys.

    `flat` makes flat keys of what a file holds; None: it is not this trainer's file.
    """

    name: str
    tables: tuple[str, ...]
    flat: Callable[[Mapping[str, Any]], dict[str, Any] | None]
    read: Callable[[Foreign], None]

    @cached_property
    def keys(self) -> Mapping[str, KeyRule]:
        """The rule of every key that is known, `datasets[].path` standing for each of a list."""
        return rules_of(*self.tables)


@cache
def table_of(name: str) -> dict[str, Any]:
    """Return the table of a trainer as its file has it."""
    text = files("lora_trainer.importing.trainers").joinpath(f"{name}.toml").read_text("utf-8")
    return tomllib.loads(text)


def rules_of(*names: str) -> dict[str, KeyRule]:
    """Return the rules of some tables by key; later ones win."""
    rules: dict[str, KeyRule] = {}
    for name in names:
        table = table_of(name)
        absent = table.get("absent", "").split()
        rules = {key: rule for key, rule in rules.items() if key not in absent} | _rules(table)
    return rules


def _rules(table: Mapping[str, Any]) -> dict[str, KeyRule]:
    rules: dict[str, KeyRule] = {}
    for key, fields in table.get("carried", {}).items():
        entry = {"setting": fields} if isinstance(fields, str) else fields
        meanings: Any = entry.get("values")
        rules[key] = KeyRule(
            kind="carried",
            setting=entry["setting"],
            default=entry.get("default"),
            read=words(table_of("words")["dtypes"] if meanings == "dtypes" else meanings)
            if meanings
            else None,
        )
    for kind in KINDS:
        for entry in table.get(kind, ()):
            rule = KeyRule(kind=kind, why=entry.get("why", ""), off=tuple(entry.get("off", ())))
            for prefix in entry.get("under", [""]):
                rules |= {f"{prefix}{key}": rule for key in entry["keys"].split()}
    return rules


def words(meanings: Mapping[str, Any]) -> Reader:
    """Return a reader of one of some words, letter case aside; "*" stands for all others."""
    ours = {name.lower(): value for name, value in meanings.items()}

    def read(value: Any) -> Any:
        word = str(value).lower()
        if word not in ours and "*" not in ours:
            raise ValueError(f"none of {', '.join(meanings)} is meant")
        return ours.get(word, ours.get("*"))

    return read


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one: `a.b`, and `a[0].b` for lists of tables."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for number, table in enumerate(value):
                flat |= flattened(table, f"{key}[{number}].")
        else:
            flat[key] = value
    return flat


def _set_rows(foreign: Foreign, trainer: Trainer) -> None:
    """Carry over the settings in the `set` rows of a trainer's tables."""
    carried_settings: set[str] = set()
    for row in (row for table in trainer.tables for row in table_of(table).get("set", ())):
        key, setting = row["key"], row.get("to", "")
        value = foreign.get(key, row.get("default"))
        word = str(value).lower()
        our_values = {name.lower(): ours for name, ours in row.get("values", {}).items()}
        if (
            setting in carried_settings
            or rule_of(trainer.keys, key) is None
            or not _fits(foreign, row, word)
        ):
            continue
        if our_values and word not in our_values:
            continue
        names = [name for name in row.get("when", {}) if name in foreign.values]
        foreign.named.update(names)
        if "lacks" in row:
            if key not in foreign.named:
                foreign.lacks(key, value, row["lacks"])
            continue
        if setting:
            if not foreign.carry(setting, key, row.get("is", our_values.get(word, value))):
                continue
            carried_settings.add(setting)
            if names and key in foreign.values:
                foreign.sources[setting] = " x ".join([*names, foreign.sources[setting]])
        if "how" in row:
            how = row["how"].format(now=foreign.settings)
            foreign.is_nearest(key, how if value is True else f"{value}: {how}")


def _fits(foreign: Foreign, row: Mapping[str, Any], word: str) -> bool:
    """Say whether a row is for this file; `word` is what its key says, in lower case."""
    kinds = ("flow" if foreign.is_flow else "noise", foreign.settings.get("adapter.kind"), None)
    return (
        row.get("for") in kinds
        and bool("default" in row or foreign.on(row["key"]))
        and ("beside" not in row or bool(foreign.on(row["beside"])))
        and word in row.get("only", (word,))
        and word not in row.get("unless", ())
        and all(
            str(foreign.get(name, "")).lower() in words
            for name, words in row.get("when", {}).items()
        )
    )


def apply(trainer: Trainer, foreign: Foreign) -> None:
    """Say what becomes of every key; raises RequestError for what is refused."""
    trainer.read(foreign)
    _set_rows(foreign, trainer)
    for name, value in foreign.values.items():
        if name in foreign.named:
            continue
        rule = rule_of(trainer.keys, name)
        if rule is None:
            foreign.unknown.append(name)
        elif rule.kind == "carried":
            foreign.carry(rule.setting, name, value, rule.read)
        elif rule.kind == "refused":
            foreign.refuse(name, value, rule.why, off=rule.off)
        elif rule.kind == "no_equivalent":
            foreign.lacks(name, value, rule.why, off=rule.off)
        elif rule.why and not is_one_of(value, OFF) and not name.startswith(foreign.untrained):
            foreign.stays(name, rule.why)
        else:
            foreign.lacks(name, value, "means nothing beside the other options")
    for name, rule in trainer.keys.items():
        is_set = rule.setting in foreign.settings or foreign.get(name, None) is not None
        if rule.default is not None and not is_set:
            value = rule.read(rule.default) if rule.read else rule.default
            foreign.set(rule.setting, value, note=f"{name}: {THERE}")
    _name_replaced(foreign)


def rule_of(keys: Mapping[str, KeyRule], name: str) -> KeyRule | None:
    """Return the rule of a key, else the reason that a table around it states for all its keys."""
    name = _INDEX.sub("[]", name)
    rule = keys.get(name)
    while rule is None and "." in name:
        name = name.rpartition(".")[0].removesuffix("[]")
        rule = keys.get(name)
        if rule is not None and rule.kind in ("carried", "read"):
            return None
    return rule


def _name_replaced(foreign: Foreign) -> None:
    """Name the keys whose setting another key has replaced since."""
    reported = {*foreign.nearest, *foreign.nothing_to_set, *foreign.without_equivalent}
    reported |= {*foreign.unknown, *" ".join(foreign.sources.values()).split()}
    for name in foreign.values:
        if name not in reported and not any(key.startswith(f"{name}.") for key in reported):
            foreign.stays(name, "another key says it")
