"""A settings file of another trainer, and the engine that reads or reports each of its keys.

A key becomes a setting, or a setting by the nearest that there is; needs none; has no equivalent; or is
unknown. Input: the file's values by flat key (`train.lr`, `datasets[0].path`), and the tables of its trainer.

A table is a TOML file in `trainers/`; a trainer may have several, of which later ones win. In it:

`[carried]`: key = our setting, or a table with `setting`, `default` (what the trainer does without the key) and
`values` (what its values mean, "*" for any other).
`[[read]]`: keys that the trainer's own function reads, and why one of which it says nothing needs no setting.
`[[nothing_to_set]]`, `[[no_equivalent]]`, `[[refused]]`: keys, and why. `off` has values that change nothing.
`[also]`: our setting = the keys that the trainer's own function carries over, by which a search finds the setting.

Lists have `keys`, parted by blanks, and `under`, what stands before them. Further tables are `Foreign.table`, for the
trainer's function.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.wording import without_secrets
from lora_trainer.config.config import all_settings, overlaid, setting_keys, setting_of

# A value and the flat key that it is from, or `THERE`.
Sourced = tuple[Any, str]
THERE = "the default there"
# The name under which the list is kept that a file holds in place of a table.
LIST = "[]"
# Values with which an option of another trainer does nothing.
OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None")

# Words that are a yes.
YES = ("true", "1", "yes")


@dataclass(kw_only=True)
class Foreign:
    """A foreign file, and what becomes of its keys: `settings` by key, and for each the `sources` it is from.

    `values` are the file's by flat key and those of further files that it names, `data` its tables, `beside`
    the folder it lies in (None: nothing beside it may be read), `called` what the file calls a key that is read
    under another name. `trainer` is the program whose file it is, `table` its tables as one. `is_flow` says
    whether the base is trained by flow matching, `trains_text` whether its text encoders can be trained here,
    `edits` whether it can be given reference images; None: the file does not say which base it is.
    `is_schedule_free`: its optimizer has no schedule. `untrained` has what stands before the keys of folders
    without a path, `named` the keys of which something is said: `nearest` how they are approximated, the others
    why they became no setting, `out_of_use` keys of a model that is not chosen, whose names another key has taken.
    `images` is a folder whose images are those of the file, in place of `dataset`; `counts_images` says that the
    length is in epochs, which become steps where the images are there.
    What `data.folders` holds has a source for each of its parts. `dataset` is the folder to train on as the file
    has it, None where it names none; `is_dataset` says that it is the file itself, with the words of a slider.
    """

    trainer: str
    table: Mapping[str, Any]
    values: dict[str, Any]
    data: Mapping[str, Any]
    beside: Path | None
    called: dict[str, str] = field(default_factory=dict)
    is_flow: bool | None = None
    trains_text: bool | None = None
    edits: bool | None = None
    is_schedule_free: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nearest: dict[str, str] = field(default_factory=dict)
    nothing_to_set: dict[str, str] = field(default_factory=dict)
    without_equivalent: dict[str, str] = field(default_factory=dict)
    out_of_use: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    dataset: str | None = None
    is_dataset: bool = False
    images: Path | None = None
    counts_images: bool = False
    named: set[str] = field(default_factory=set)
    untrained: tuple[str, ...] = ()

    # ---- what the file has

    def on(self, name: str) -> Any:
        """Return a key's value, None where it is off or missing."""
        value = self.values.get(name)
        return None if is_one_of(value, OFF) else value

    def first_on(self, *names: str) -> str | None:
        """Return the first of the keys that is neither off nor 0."""
        return next((name for name in names if self.on(name)), None)

    def get(self, name: str, default: Any) -> Any:
        """Return a key's value, `default` where it is missing or empty."""
        value = self.values.get(name)
        return default if value is None or value == "" else value

    def word(self, name: str, default: str) -> str:
        """Return a key's value as text, `default` where it is missing or empty."""
        return str(self.get(name, default))

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a key's value as a number; any other value is named, and counts as missing."""
        value = self.get(name, None)
        if value is None:
            return default
        try:
            return as_number(value)
        except ValueError as error:
            self.lacks(name, value, str(error))
            return default

    def nonzero(self, name: str, default: float) -> float:
        """Return a key's value as a number, `default` where it is 0 or missing."""
        return self.number(name) or default

    def sourced(self, name: str, default: float) -> Sourced:
        """Return a key's value as a number, `default` where it is 0 or missing, and the key."""
        return self.nonzero(name, default), name

    def says(self, name: str, default: str = "") -> str:
        """Return a key's value in lower case, as the words that trainers compare."""
        return self.word(name, default).lower()

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a key's value as a yes or no."""
        value = self.get(name, default)
        return value.lower() in YES if isinstance(value, str) else bool(value)

    # ---- what becomes of it

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set one of our settings from foreign keys; `note` says more of its source.

        Keys that the file lacks are left out; without any, the value is the default there.
        """
        assert setting_of(key) in setting_keys(), key
        sources = [name for name in names if name in self.values]
        sources = sources or [name for name in names if name == THERE][:1]
        self.settings = overlaid(self.settings, {key: value})
        words = (" x ".join(sources), note or ("" if sources else THERE))
        self.sources[key] = " ".join(part for part in words if part)
        self.named.update(sources)

    def carry(
        self, key: str, name: str, value: Any = ..., meanings: Mapping[str, Any] | None = None
    ) -> bool:
        """Set our setting `key` from the foreign key `name`; return whether its value could be carried over.

        `value` is what the key says if that is not its value in the file, `meanings` what its words mean.
        """
        value = self.values.get(name) if value is ... else value
        if value is None or value == "":
            self.stays(name, "is not given")
            return False
        try:
            ours = value if meanings is None else meaning_of(value, meanings)
            ours = _as_ours(key, ours, self.settings)
        except (TypeError, ValueError, OverflowError) as error:
            self.lacks(name, value, str(error))
            return False
        self.set(key, ours, name)
        return True

    def carry_if_on(
        self, key: str, name: str, value: Any = ..., *, default: Any = None, by: str = ""
    ) -> bool:
        """Carry a key over that is on in the file; return whether it was on and could be carried over.

        `default` is what the trainer takes where the file lacks the key; with one the key is always carried over.
        `by` is a further key that decides about this one, and is named as a source beside it.
        """
        if default is None and not self.on(name):
            return False
        if by in self.values:
            self.named.add(by)
        if not self.carry(key, name, self.get(name, default) if value is ... else value):
            return False
        if by in self.values and name in self.values:
            self.sources[key] = f"{by} x {self.sources[key]}"
        return True

    def lacks_if_on(self, name: str, why: str) -> None:
        """Say that a key has no equivalent, where it is on and nothing was said of it yet."""
        if self.on(name) and name not in self.named:
            self.lacks(name, self.values[name], why)

    def is_nearest_to(self, name: str, how: str) -> None:
        """Say how the value of a key is approximated, naming the value where it is more than a yes."""
        value = self.values.get(name)
        self.is_nearest(name, how if value is True else f"{value}: {how}")

    def stays(self, name: str, why: str) -> None:
        """Say that a key needs no setting here."""
        self.nothing_to_set[name] = why
        self.named.add(name)

    def is_nearest(self, name: str, how: str) -> None:
        """Say that a key is only approximated, and how."""
        self.nearest[name] = how
        self.named.add(name)

    def lacks(self, name: str, value: Any, why: str, *, off: Iterable[Any] = ()) -> None:
        """Say that a key has no equivalent; one that is off there needs none, `off` has more such values."""
        if is_one_of(value, (*OFF, 0.0)):
            self.stays(name, f"is off there ({shown(value)})")
        elif is_one_of(value, off):
            self.stays(name, f"changes nothing with this value ({shown(value)})")
        else:
            self.without_equivalent[name] = f"{shown(value)}: {why}"
            self.named.add(name)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `import --json`."""
        kinds = ("trainer", "nearest", "nothing_to_set", "without_equivalent", "unknown", "dataset")
        plain = {name: vars(self)[name] for name in kinds}
        return {"settings": self.settings, "from": self.sources, **plain}


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Say whether a value is one of some, where 1, 1.0 and true are three."""
    return any(type(value) is type(one) and value == one for one in values)


def shown(value: Any) -> str:
    """Return a foreign value as one short line without tokens in it."""
    text = without_secrets(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- values as our settings take them


def meaning_of(value: Any, meanings: Mapping[str, Any]) -> Any:
    """Return the meaning of a word, letter case aside; "*" stands for all others; raises ValueError for others."""
    ours = {name.lower(): meaning for name, meaning in meanings.items()}
    word = str(value).lower()
    if word not in ours and "*" not in ours:
        raise ValueError(f"none of {', '.join(meanings)} is meant")
    return ours.get(word, ours.get("*"))


def as_number(value: Any) -> float:
    """Return a number that may be written as text; raises ValueError."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # of int, where it is not finite
            number = float(value)
            is_whole = number == int(number) and not isinstance(value, float)
            return int(number) if is_whole else number
    raise ValueError("is not a number")


def _as_ours(key: str, value: Any, settings: Mapping[str, Any]) -> Any:
    """Return a value as our setting takes it: numbers and switches may be written as text.

    Raises ValueError for a value that the setting cannot take, or that is refused beside `settings`.
    """
    info = next(info for info in all_settings() if info.key == key)
    form = info.form
    if form.kind == "number" and value not in form.words:
        number = as_number(value)
        if form.whole and number != int(number):
            raise ValueError("is not a whole number")
        value = int(number) if form.whole else number
    elif form.kind != "number" and (form.kind == "switch" or True in form.words):
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value not in (True, False):
            raise ValueError("is neither true nor false")
        value = bool(value)
    elif form.kind == "text":
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("is not a text")
        value = str(value)
    if info.enforced and (why := info.unused(settings)):
        raise ValueError(why)
    if form.kind == "number" and not isinstance(value, str | None):
        low = form.low is not None and (value < form.low or (form.above_low and value == form.low))
        high = form.high is not None and (
            value > form.high or (form.below_high and value == form.high)
        )
        if low or high:
            raise ValueError(f"{key} takes {form.allowed}")
    return value


# ---- the tables of a trainer, and the engine

KINDS = ("read", "nothing_to_set", "no_equivalent", "refused")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """What becomes of a key: its kind, `carried` or one of `KINDS`, and why.

    `setting` is ours where it is carried over, `values` say what its words mean, `default` is its value
    where it is missing. With a value in `off` it changes nothing.
    """

    kind: str
    why: str = ""
    off: tuple[Any, ...] = ()
    setting: str = ""
    values: Mapping[str, Any] | None = None
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

    @cached_property
    def table(self) -> Mapping[str, Any]:
        """All its tables as one."""
        return {key: part for name in self.tables for key, part in table_of(name).items()}


@cache
def table_of(name: str) -> dict[str, Any]:
    """Return the table of a trainer as its file has it."""
    text = files("lora_trainer.importing.trainers").joinpath(f"{name}.toml").read_text("utf-8")
    return tomllib.loads(text)


def rules_of(*names: str) -> dict[str, KeyRule]:
    """Return the rules of some tables by key; later ones win."""
    rules: dict[str, KeyRule] = {}
    for table in map(table_of, names):
        for key in table.get("absent", "").split():
            rules.pop(key, None)
        for key, fields in table.get("carried", {}).items():
            entry = {"setting": fields} if isinstance(fields, str) else dict(fields)
            if entry.get("values") == "dtypes":
                entry["values"] = table_of("words")["dtypes"]
            rules[key] = KeyRule(kind="carried", **entry)
        for kind in KINDS:
            for entry in table.get(kind, ()):
                rule = KeyRule(kind=kind, why=entry.get("why", ""), off=tuple(entry.get("off", ())))
                for prefix in entry.get("under", [""]):
                    rules |= {f"{prefix}{key}": rule for key in entry["keys"].split()}
    return rules


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


def apply(trainer: Trainer, foreign: Foreign) -> None:
    """Say what becomes of every key; raises RequestError for what is refused."""
    trainer.read(foreign)
    for name, value in foreign.values.items():
        if name in foreign.named:
            continue
        rule = rule_of(trainer.keys, name)
        if rule is None:
            foreign.unknown.append(name)
        elif rule.kind == "carried":
            foreign.carry(rule.setting, name, value, rule.values)
        elif rule.kind == "refused":
            if not is_one_of(value, (*OFF, *rule.off)):
                what = f"{name}={shown(value)}: {rule.why}"
                fix = "import the file of a LoRA training of a text-to-image model"
                raise RequestError(what, fix=fix)
            foreign.stays(name, f"is off there ({shown(value)})")
        elif rule.kind == "no_equivalent":
            foreign.lacks(name, value, rule.why, off=rule.off)
        elif rule.why and not is_one_of(value, OFF) and not name.startswith(foreign.untrained):
            foreign.stays(name, rule.why)
        else:
            foreign.lacks(name, value, "means nothing beside the other options")
    for name, rule in trainer.keys.items():
        is_set = rule.setting in foreign.settings or foreign.get(name, None) is not None
        if rule.default is not None and not is_set:
            value = meaning_of(rule.default, rule.values) if rule.values else rule.default
            foreign.set(rule.setting, value, note=f"{name}: {THERE}")
    # Name the keys whose setting another key has replaced since.
    reported = {*foreign.nearest, *foreign.nothing_to_set, *foreign.without_equivalent}
    reported |= {*foreign.unknown, *" ".join(foreign.sources.values()).split()}
    for name in foreign.values:
        if name not in reported and not any(key.startswith(f"{name}.") for key in reported):
            foreign.stays(name, "another key says it")


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
