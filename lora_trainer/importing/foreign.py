"""A settings file of another trainer: its values, and what becomes of each of its keys.

A key becomes a setting, or a setting by the nearest that there is; needs none; has no equivalent; or is
unknown. Input: the file's values by flat key (`train.lr`, `datasets[0].path`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.wording import without_secrets
from lora_trainer.config.config import (
    SettingInfo,
    all_settings,
    overlaid,
    setting_keys,
    setting_of,
)

Sourced = tuple[Any, str]
"""A value and the flat key that it is from, or `THERE`."""
THERE = "the default there"
OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None")
"""Values with which an option of another trainer does nothing."""


@dataclass(kw_only=True)
class Foreign:
    """A foreign file, and what becomes of its keys: `settings` by key, and for each the `sources` it is from.

    `values` are the file's by flat key and those of further files that it names, `data` its tables, `beside`
    the folder it lies in, `called` what the file calls a key that is read under another name. `is_flow` says
    whether the base is trained by flow matching, `trains_text` whether its text encoders can be trained
    here; None: the file does not say which base it is. `is_schedule_free`: its optimizer has no schedule.
    `untrained` has what stands before the keys of folders without a path, `named` the keys of which something is
    said: `nearest` how they are approximated, the others why they became no setting. `trainer` is the program whose
    file it is. What `data.folders` holds has a source for each of its parts. `dataset` is the folder to train on
    as the file has it, None where it names none.
    """

    trainer: str
    values: dict[str, Any]
    beside: Path
    data: Mapping[str, Any] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    is_flow: bool | None = None
    trains_text: bool | None = None
    is_schedule_free: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nearest: dict[str, str] = field(default_factory=dict)
    nothing_to_set: dict[str, str] = field(default_factory=dict)
    without_equivalent: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    dataset: str | None = None
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
        """Return a key's value as a number; what is none is named, and counts as missing."""
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

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a key's value as a yes or no."""
        value = self.get(name, default)
        return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)

    def under(self, prefix: str) -> dict[str, Any]:
        """Return the values of the keys that begin with a prefix, by the rest of the key."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.values.items()
            if name.startswith(prefix)
        }

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

    def carry(self, key: str, name: str, value: Any = ..., read: Reader | None = None) -> bool:
        """Set our setting `key` from the foreign key `name`; return whether its value could be carried over.

        `value` is what the key says if that is not its value in the file.
        """
        value = self.values.get(name) if value is ... else value
        if value is None or value == "":
            self.stays(name, "is not given")
            return False
        try:
            ours = (read or _reader_of(key))(value)
            _check(key, ours, self.settings)
        except (TypeError, ValueError, OverflowError) as error:
            self.lacks(name, value, str(error))
            return False
        self.set(key, ours, name)
        return True

    def carry_on(self, key: str, name: str) -> bool:
        """Carry a key over if it is neither off nor 0; return whether that was so."""
        return bool(self.on(name)) and self.carry(key, name)

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

    def refuse(self, name: str, value: Any, why: str, *, off: Iterable[Any] = ()) -> None:
        """Raise RequestError for a key that is not off."""
        if not is_one_of(value, (*OFF, *off)):
            raise RequestError(
                f"{name}={shown(value)}: {why}",
                fix="import the file of a LoRA training of a text-to-image model",
            )
        self.stays(name, f"is off there ({shown(value)})")

    def use_own_names(self) -> None:
        """Give all keys the names that the file has for them."""
        for rows in (self.nearest, self.nothing_to_set, self.without_equivalent):
            own = {self.called.get(key, key): why for key, why in rows.items()}
            rows.clear()
            rows.update(own)
        for key, source in self.sources.items():
            self.sources[key] = " ".join(self.called.get(word, word) for word in source.split(" "))
        self.unknown = [self.called.get(key, key) for key in self.unknown]

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

Reader = Callable[[Any], Any]
"""Turns a foreign value into ours; raises ValueError with what is wrong with it."""


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


def _reader_of(key: str) -> Reader:
    """Return how a value is read as our setting: numbers and switches may be written as text."""
    if key not in _infos():
        return lambda value: value
    form = _infos()[key].form
    if form.kind == "number":
        return lambda value: value if value in form.words else _number(value, whole=form.whole)
    if form.kind == "switch" or True in form.words:
        return _switch
    return _text if form.kind == "text" else lambda value: value


@cache
def _infos() -> Mapping[str, SettingInfo]:
    return {info.key: info for info in all_settings()}


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


def _check(key: str, value: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that the setting cannot take, or that is refused beside the others."""
    info = _infos().get(key)
    if info is None:
        return
    if info.enforced and (why := info.unused(settings)):
        raise ValueError(why)
    form = info.form
    if form.kind != "number" or isinstance(value, str | None):
        return
    low = form.low is not None and (value < form.low or (form.above_low and value == form.low))
    high = form.high is not None and (value > form.high or (form.below_high and value == form.high))
    if low or high:
        raise ValueError(f"{key} takes {form.allowed}")
