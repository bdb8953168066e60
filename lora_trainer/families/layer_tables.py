"""The layers of the public releases' denoisers, by name: shapes of their weights, without torch.

`scripts/write_layer_tables.py` writes `layer_tables.json` from the networks themselves: per family a list of
architectures, each as rows (template, shape, ranges). A template is a layer's name with `#` for each number;
a range is "0.3-7": all numbers but the last, then the first and last value of the last number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("layer_tables.json")
Shapes = Mapping[str, tuple[int, ...]]
"""Layer name -> shape of its weight: [out, in, ...], or [width] of a norm."""
Row = tuple[str, list[int], list[str]]
# `blocks.1.` and `linear_1` get `#`; the digit of `w1` belongs to its letter and stays.
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?=\.|$)")


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, list[Any]]:
    tables: Mapping[str, list[Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tables


@lru_cache(maxsize=64)
def released_layers(family: str) -> tuple[Shapes, ...]:
    """Return the layers of each released architecture of a family, () for an unknown family."""
    return tuple(unpacked(rows) for rows in _tables().get(family, []))


def unpacked(rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
    """Return the layers of one architecture from rows (template, shape, ranges) of the file."""
    return {
        name: tuple(shape) for template, shape, ranges in rows for name in _named(template, ranges)
    }


def packed(layers: Shapes) -> list[Row]:
    """Return one architecture as rows (template, shape, ranges) of the file."""
    rows: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for name, shape in layers.items():
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        rows.setdefault((_NUMBER.sub("#", name), shape), []).append(numbers)
    return [
        (template, list(shape), list(_ranges(sorted(numbers))))
        for (template, shape), numbers in rows.items()
    ]


def _ranges(numbers: list[tuple[int, ...]]) -> Iterator[str]:
    first = last = numbers[0]
    # None ends the last range.
    for numbers_next in (*numbers[1:], None):
        if numbers_next and numbers_next[:-1] == last[:-1] and numbers_next[-1] == last[-1] + 1:
            last = numbers_next
            continue
        if first:
            yield ".".join([*map(str, first[:-1]), f"{first[-1]}-{last[-1]}"])
        else:
            yield ""
        if numbers_next:
            first = last = numbers_next


def _named(template: str, ranges: list[str]) -> Iterator[str]:
    pieces = template.split("#")
    for range_text in ranges:
        if not range_text:
            yield template
            continue
        *outer, spread = range_text.split(".")
        start, _, end = spread.partition("-")
        for last in range(int(start), int(end) + 1):
            numbers = [*outer, str(last), ""]
            yield "".join(piece + number for piece, number in zip(pieces, numbers, strict=True))
