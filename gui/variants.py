"""Several trainings of one draft: each with one of the values of some settings, all combinations of them.

Input: a draft with further values (`also`). Outputs: the drafts of the single trainings; a series, the record of what
was put into the queue together, in `<runs>/.gui/series/ID.json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, read_regular, write_atomic
from lora_trainer.queue import commands

from . import command_lines, drafts, setting_edit
from .drafts import Draft
from .setting_text import text_of
from .workplace import Workplace

MAX_TRAININGS = 12
_ID = re.compile(r"[0-9a-f]{12,20}")
_BETWEEN = re.compile(r"[\s,;]+")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One training of several; `values` are those it differs by, without those that the plan chooses."""

    values: Mapping[str, Any]
    draft: Draft


@dataclass(frozen=True, kw_only=True)
class Member:
    """A training of a series: its item in the queue, the name of its run, what it differs by."""

    item: str
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Trainings that were put into the queue together; `keys` are the settings by which they differ.

    `planned` are values of these that the plan chose, as far as one was seen before the start.
    """

    id: str
    label: str
    keys: tuple[str, ...]
    members: tuple[Member, ...]
    planned: Mapping[str, Any] = field(default_factory=dict)


_SERIES = TypeAdapter(Series)
_Differing = TypeVar("_Differing", Variant, Member)


def with_values(draft: Draft, *, key: str, text: str) -> Draft:
    """Return the draft with further values of a setting, an empty text for none.

    Raises RequestError for what cannot be a value, and for too many trainings.
    """
    words = [word for word in _BETWEEN.split(text) if word]
    typed = [setting_edit.changed(draft, key=key, text=word).settings[key] for word in words]
    others = {name: values for name, values in draft.also.items() if name != key}
    also = {**others, key: list(dict.fromkeys(typed))} if typed else others
    changed = replace(draft, also=also)
    count = math.prod(len(values) + 1 for values in also.values())
    if count > MAX_TRAININGS:
        raise RequestError(
            f"these are {count} trainings", fix=f"choose fewer values: at most {MAX_TRAININGS}"
        )
    return changed


def text_for(draft: Draft, key: str) -> str:
    """Return the further values of a setting as they are typed."""
    return ", ".join(text_of_value(key, value) for value in draft.also.get(key, ()))


def text_of_value(key: str, value: Any) -> str:
    """Return a value of a setting as its field shows it."""
    return text_of(setting_edit.setting(key), value)


def variants(draft: Draft) -> tuple[Variant, ...]:
    """Return the single trainings of a draft, its own one first; one where it has no further values."""
    keys = [key for key, values in draft.also.items() if values]
    own = setting_edit.given(draft)
    choices = [[own.get(key), *draft.also[key]] for key in keys]
    found: dict[tuple[Any, ...], Variant] = {}
    for values in product(*choices):
        chosen = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        single = replace(draft, also={}, settings={**draft.settings, **chosen})
        found.setdefault(values, Variant(values=chosen, draft=single))
    return tuple(found.values())


def in_order(
    differing: Sequence[_Differing], *, keys: Sequence[str], planned: Mapping[str, Any]
) -> list[_Differing]:
    """Return trainings in the order of the values by which they differ; `planned` are values that a plan has chosen.

    Words among numbers, or a value that no plan has chosen yet, leave them as they were typed.
    """
    try:
        return sorted(
            differing, key=lambda each: [each.values.get(key, planned.get(key)) for key in keys]
        )
    except TypeError:
        return list(differing)


def start(work: Workplace, draft: Draft, *, planned: Mapping[str, Any]) -> Series:
    """Put all trainings of a draft into the queue in the order of their values, or none; raises LoraTrainError.

    `planned` are values that its plan chose for the settings by which they differ.
    """
    label = command_lines.label_of(draft, work)
    taken = {path.name for path in work.runs.iterdir()}
    members = list[Member]()
    try:
        for variant in in_order(variants(draft), keys=tuple(draft.also), planned=planned):
            name = _name(label, variant.values, taken)
            taken.add(name)
            words = command_lines.train_words(replace(variant.draft, name=name), work)
            item = commands.add(work.runs, words, label=name)
            members.append(Member(item=item.id, name=name, values=variant.values))
        series = Series(
            id=drafts.new_id(),
            label=label,
            keys=tuple(draft.also),
            members=tuple(members),
            planned=planned,
        )
        _write(work, series)
    except LoraTrainError:
        for member in members:
            with suppress(RequestError):  # the first one may have begun already
                commands.remove(work.runs, member.item)
        raise
    return series


def _name(label: str, values: Mapping[str, Any], taken: set[str]) -> str:
    """Return a name for a run that says what it differs by, and that no other has."""
    parts = [f"{key.rpartition('.')[2]}{value}" for key, value in values.items()]
    name = command_lines.run_name("-".join((label, *parts))[:90])
    number = 2
    unused = name
    while unused in taken:
        unused = f"{name}-{number:03d}"
        number += 1
    return unused


def _folder(work: Workplace) -> Path:
    return work.own / "series"


def _write(work: Workplace, series: Series) -> None:
    file = _folder(work) / f"{series.id}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error
    write_atomic(file, json_bytes(asdict(series)))


def read(work: Workplace, series_id: str) -> Series:
    """Return a series; raises RequestError for an unknown one, or a damaged record."""
    file = _folder(work) / f"{series_id}.json"
    try:
        if not _ID.fullmatch(series_id):
            raise FileNotFoundError
        return _SERIES.validate_json(read_regular(file))
    except (OSError, ValidationError):
        raise RequestError(
            f"the series {series_id[:40]!r} does not exist", fix="choose one from the list"
        ) from None


def find(work: Workplace) -> Iterator[Series]:
    """Yield all series that can be read, the newest first."""
    for file in sorted(_folder(work).glob("*.json"), reverse=True):
        try:
            yield read(work, file.stem)
        except RequestError:
            continue


def runs_of(work: Workplace, members: Sequence[Member]) -> list[str]:
    """Return the name of the run of each member: as the queue knows it, else the one it was to have."""
    known = {item.id: item.run for item in commands.items(work.runs)}
    return [known.get(member.item) or member.name for member in members]
