"""Records: frozen dataclasses that are JSON objects in a file, written as such and read from a file of any release.

Reading never fails: what a file lacks or has of another type counts as "not known", which is NaN for a figure, 0 for a
count, None where the type has it, nothing for a text, a list or an object. Keys that no field has are passed over. So a
record has no defaults, and mypy demands every field of whoever writes one. Where a program cannot do without a value it
asks `unreadable` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

# More than any run has, and a number that floats hold exactly.
MOST_STEPS = 2**53
# Above every figure of a run.
_MOST = 1e100

REST = "rest"
"""A field of this name has the keys of its object that nobody reads one by one; they are written behind the others."""
NEEDED: Mapping[str, Any] = {"needed": True}
"""The metadata of a field that `unreadable` demands."""
NEEDED_IF_THERE: Mapping[str, Any] = {"needed": False}
"""The metadata of a field that `unreadable` demands to be readable where the file has it."""
ONLY_IF_ANY: Mapping[str, Any] = {"only_if_any": True}
"""The metadata of a field that an object has only where there is something in it."""


def is_step(value: Any) -> TypeGuard[int]:
    """Whether a value of a file is a number of steps that a program can have counted."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS


def figure(value: Any) -> float:
    """Return a number of a file, NaN for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    # Also false for NaN. A sum of larger ones would be infinite, and infinite ones have none.
    return value if abs(value) < _MOST else math.nan


def as_json(value: Any) -> Any:
    """Return a record, or a value of one, as plain JSON; a number that is not finite is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return _object_of(value) if is_dataclass(value) else value


def of_json(kind: type[Record], value: Any) -> Record:
    """Return a JSON value as a record; one that is not an object counts as an empty one."""
    row = value if isinstance(value, dict) else {}
    of: Any = kind
    readers = readers_of(of)
    found = {name: read(row.get(name)) for name, read in readers.items()}
    if REST in found:
        found[REST] = {
            key: entry for key, entry in row.items() if key not in readers or key == REST
        }
    return kind(**found)


def unreadable(kind: type, value: Mapping[str, Any]) -> str:
    """Return the first key that a record needs and that reading would lose, such as `base.source`; empty: none."""
    types = get_type_hints(kind)
    for each in fields(kind):
        needed = each.metadata.get("needed")
        if needed is None or (each.name not in value and not needed):
            continue
        here = value.get(each.name)
        if is_dataclass(types[each.name]):
            if not isinstance(here, dict):
                return each.name
            if lost := unreadable(types[each.name], here):
                return f"{each.name}.{lost}"
        elif here is None or as_json(readers_of(kind)[each.name](here)) != here:
            return each.name
    return ""


@cache
def readers_of(kind: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return for each field of a record how a value of a file becomes one of it."""
    types = get_type_hints(kind)
    return {each.name: reader_of(types[each.name]) for each in fields(kind)}


def reader_of(of: Any) -> Callable[[Any], Any]:
    """Return how a value of a file becomes one of this type."""
    if of in READ_BY_TYPE:
        return READ_BY_TYPE[of]
    if is_dataclass(of):
        return partial(_record, of)
    parts = get_args(of)
    if get_origin(of) is UnionType:
        return partial(_record_or_none, parts[0])
    if get_origin(of) is Sequence:
        return partial(_records, parts[0])
    return partial(_by_name, reader_of(parts[1]))


def _object_of(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name == REST:
            found |= as_json(value)
        elif value or "only_if_any" not in each.metadata:
            found[each.name] = as_json(value)
    return found


def _record(kind: Any, value: Any) -> Any:
    return of_json(kind, value)


def _record_or_none(kind: Any, value: Any) -> Any:
    return of_json(kind, value) if isinstance(value, dict) else None


def _records(kind: Any, value: Any) -> tuple[Any, ...]:
    return tuple(of_json(kind, row) for row in _list(value) if isinstance(row, dict))


def _by_name(read: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {name: read(entry) for name, entry in _object(value).items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int:
    return value if is_step(value) else 0


def _count_or_none(value: Any) -> int | None:
    return value if is_step(value) else None


def _figure_or_none(value: Any) -> float | None:
    number = figure(value)
    return number if math.isfinite(number) else None


def _is_true(value: Any) -> bool:
    return value is True


def _yes_no_or_none(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole_or_text(value: Any) -> int | str:
    return value if isinstance(value, int) else _text(value)


def _any(value: Any) -> Any:
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _figures(value: Any) -> tuple[float, ...]:
    return tuple(map(figure, _list(value)))


def _pairs(value: Any) -> tuple[tuple[float, float], ...]:
    pairs = (pair for pair in _list(value) if isinstance(pair, list) and len(pair) == 2)
    return tuple((float(figure(first)), float(figure(second))) for first, second in pairs)


def _texts_by_name(value: Any) -> dict[str, str]:
    return {name: entry for name, entry in _object(value).items() if isinstance(entry, str)}


READ_BY_TYPE: Mapping[Any, Callable[[Any], Any]] = {
    str: _text,
    str | None: _text_or_none,
    int: _count,
    int | None: _count_or_none,
    float: figure,
    float | None: _figure_or_none,
    bool: _is_true,
    bool | None: _yes_no_or_none,
    int | str: _whole_or_text,
    object: _any,
    Sequence[str]: _texts,
    Sequence[float]: _figures,
    Sequence[tuple[float, float]]: _pairs,
    Mapping[str, Any]: _object,
    Mapping[str, str]: _texts_by_name,
}
"""How a value of a file becomes one of each type; lists of records, and objects with names of one type, need no row."""
