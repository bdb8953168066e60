"""The table of a trainer: for each of its keys what becomes of it, and the engine that applies it.

A trainer is one `Trainer`: how its files are recognised, a rule for every key it knows, and a function
for what depends on several keys. Input: the file's values by flat key (`train.lr`, `datasets[0].path`).
Output: findings in which every key of the file is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import all_settings
from lora_trainer.config.forms import Form
from lora_trainer.importing.foreign_settings import OFF, Findings, shown

Reader = Callable[[Any], Any]
"""Turns a foreign value into ours; raises ValueError with what is wrong with it."""
THERE = "the default there"
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class To:
    """The key is our setting `key`; where it is left out it is `missing` there, None: what it is here."""

    key: str
    read: Reader | None = None
    missing: Any = None


@dataclass(frozen=True)
class Idle:
    """The key needs no setting here, and why."""

    why: str


@dataclass(frozen=True)
class Lacks:
    """The key has no equivalent, which is said unless it is off: one of `OFF` or of `off`."""

    why: str
    off: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A file is refused whose key is neither off nor one of `unless`."""

    why: str
    unless: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Together:
    """The key is read with others, by the trainer's own function."""


Rule = To | Idle | Lacks | Refused | Together
TOGETHER = Together()


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """Return a table in which all names, parted by spaces, have one rule."""
    return dict.fromkeys(names.split(), rule)


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


def under(prefix: str, table: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return a table whose names begin with a prefix."""
    return {f"{prefix}{name}": rule for name, rule in table.items()}


def words(meanings: Mapping[str, Any]) -> Reader:
    """Return a reader of one of some words, letter case aside."""
    ours = {name.lower(): value for name, value in meanings.items()}

    def read(value: Any) -> Any:
        word = str(value).lower()
        if word not in ours:
            raise ValueError(f"none of {', '.join(meanings)} is meant")
        return ours[word]

    return read


PRECISIONS = words(
    {
        "no": "fp32",
        "float": "fp32",
        "float32": "fp32",
        "fp32": "fp32",
        "float_32": "fp32",
        "tfloat_32": "fp32",
        "tf32": "fp32",
        "fp16": "fp16",
        "float16": "fp16",
        "float_16": "fp16",
        "bf16": "bf16",
        "bfloat16": "bf16",
        "bfloat_16": "bf16",
    }
)
"""Reader of a dtype as all trainers write it."""


@dataclass(kw_only=True)
class Foreign:
    """A foreign file while it is read: its values by flat key, what was found, and what is known of it.

    `data` are its tables, `extra` flat keys of further files that it names, `beside` the folder it lies
    in, `called` what the file calls a key that is read under another name. `is_flow` says whether the base
    is trained by flow matching, `trains_text` whether its text encoders can be trained here; None: the file
    does not say which base it is. `is_schedule_free`: the optimizer that it names has no schedule.
    """

    values: Mapping[str, Any]
    beside: Path
    data: Mapping[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    is_flow: bool | None = None
    trains_text: bool | None = None
    is_schedule_free: bool = False

    def on(self, name: str) -> Any:
        """Return a key's value, None where it is off or missing."""
        value = self.values.get(name)
        return None if any(type(value) is type(off) and value == off for off in OFF) else value

    def get(self, name: str, default: Any) -> Any:
        """Return a key's value, `default` where it is missing or empty."""
        value = self.values.get(name)
        return default if value is None or value == "" else value

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a key's value as a number; what is none is named, and counts as missing."""
        value = self.values.get(name)
        if value is None or value == "":
            return default
        try:
            return as_number(value)
        except ValueError as error:
            self.findings.lacks(name, value, str(error))
            return default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a key's value as a yes or no."""
        value = self.get(name, default)
        return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)

    def there(self, *names: str) -> tuple[str, ...]:
        """Return those of the names that the file has; that it is the default there if none."""
        return tuple(name for name in names if name in self.values) or (THERE,)

    def stay(self, why: str, *names: str) -> None:
        """Say that the file's keys among these need no setting, where nothing was said of them yet."""
        for name in names:
            if name in self.values and name not in self.findings.named:
                self.findings.stays(name, why)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One trainer: its name, its keys, how its files are told from others', and what needs several keys.

    `flat` makes flat keys of what a file holds; None: it is not this trainer's file.
    """

    name: str
    flat: Callable[[Mapping[str, Any]], dict[str, Any] | None]
    keys: Mapping[str, Rule]
    read: Callable[[Foreign], None]


def as_number(value: Any) -> float:
    """Return a number that may be written as text; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is no number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError("is no number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError("is no number")
    return int(number) if number == int(number) and not isinstance(value, float) else number


def apply(trainer: Trainer, foreign: Foreign) -> None:
    """Say what becomes of every key; raises RequestError for what is refused."""
    trainer.read(foreign)
    findings = foreign.findings
    for name, value in {**foreign.values, **foreign.extra}.items():
        if name in findings.named:
            continue
        match rule_of(trainer.keys, name):
            case To(key, read):
                carry(findings, key, name, value, read)
            case Idle(why):
                findings.stays(name, why)
            case Lacks(why, off):
                findings.lacks(name, value, why, off=off)
            case Refused(why, unless):
                refuse_unless_off(findings, name, value, why, unless)
            case Together():
                findings.lacks(name, value, "means nothing beside the other options")
            case None:
                findings.unknown.append(name)
    _take_defaults(trainer.keys, foreign)
    _name_replaced(foreign)


def rule_of(keys: Mapping[str, Rule], name: str) -> Rule | None:
    """Return the rule of a key, else the reason that a table around it states for all its keys."""
    name = _INDEX.sub("[]", name)
    rule = keys.get(name)
    while rule is None and "." in name:
        name = name.rpartition(".")[0].removesuffix("[]")
        rule = keys.get(name)
        if isinstance(rule, To | Together):
            return None
    return rule


def _name_replaced(foreign: Foreign) -> None:
    """Name the keys whose setting another key has replaced since."""
    findings = foreign.findings
    shown_keys = {*findings.nearest, *findings.nothing_to_set, *findings.without_equivalent}
    shown_keys |= {*findings.unknown, *" ".join(findings.sources.values()).split()}
    for name in {**foreign.values, **foreign.extra}:
        if name not in shown_keys and not any(key.startswith(f"{name}.") for key in shown_keys):
            findings.stays(name, "another key says it")


def carry(findings: Findings, key: str, name: str, value: Any, read: Reader | None = None) -> bool:
    """Set our setting `key` from the foreign key `name`; return whether its value could be carried over."""
    if value is None or value == "":
        findings.stays(name, "is not given")
        return False
    try:
        ours = (read or _reader_of(key))(value)
        _check_bounds(key, ours)
    except (TypeError, ValueError, OverflowError) as error:
        findings.lacks(name, value, str(error))
        return False
    findings.set(key, ours, name)
    return True


def refuse_unless_off(
    findings: Findings, name: str, value: Any, why: str, unless: Iterable[Any] = ()
) -> None:
    """Raise RequestError for a key that is not off."""
    if any(type(value) is type(off) and value == off for off in (*OFF, *unless)):
        findings.stays(name, f"is off there ({shown(value)})")
        return
    raise RequestError(
        f"{name}={shown(value)}: {why}",
        fix="import the file of a LoRA training of a text-to-image model",
    )


def _take_defaults(keys: Mapping[str, Rule], foreign: Foreign) -> None:
    for name, rule in keys.items():
        if not isinstance(rule, To) or rule.missing is None or rule.key in foreign.findings.values:
            continue
        if foreign.get(name, None) is None:
            value = rule.read(rule.missing) if rule.read else rule.missing
            foreign.findings.set(rule.key, value, note=f"{name}: {THERE}")


def _reader_of(key: str) -> Reader:
    """Return how a value is read as our setting: numbers and switches may be written as text."""
    form = _forms().get(key)
    if form is not None and form.kind == "number":
        return lambda value: value if value in form.words else _number(value, whole=form.whole)
    if form is not None and form.kind == "switch":
        return _switch
    if form is not None and form.kind == "text":
        return _text
    return lambda value: value


@cache
def _forms() -> Mapping[str, Form]:
    return {info.key: info.form for info in all_settings()}


def _number(value: Any, *, whole: bool) -> float:
    number = as_number(value)
    if whole and number != int(number):
        raise ValueError("is no whole number")
    return int(number) if whole else number


def _switch(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (True, False):
        return bool(value)
    raise ValueError("is neither true nor false")


def _text(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError("is no text")


def _check_bounds(key: str, value: Any) -> None:
    """Raise ValueError for a number that the setting cannot take."""
    form = _forms().get(key)
    if form is None or form.kind != "number" or isinstance(value, str | None):
        return
    low = form.low is not None and (value < form.low or (form.above_low and value == form.low))
    high = form.high is not None and (value > form.high or (form.below_high and value == form.high))
    if low or high:
        raise ValueError(f"{key} takes {form.allowed}")
