"""The layers of the public releases' denoisers, by name: shapes of their weights, without torch.

`layer_tables.json` is written by `scripts/write_layer_tables.py` from the networks themselves: by
family a list of architectures, each as rows (template, shape, places). A template is a layer's name with
`#` for every number, a place the numbers, the last one as a range.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("layer_tables.json")
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of the weight by layer: [out, in, ...], or [width] of a norm."""
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?=\.|$)")


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, list[Any]]:
    found: Mapping[str, list[Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=64)
def released_layers(family: str) -> tuple[Shapes, ...]:
    """Return the layers of each architecture a family was released in, empty for an unknown family."""
    return tuple(
        {
            name: tuple(shape)
            for template, shape, places in rows
            for name in _named(template, places)
        }
        for rows in _tables().get(family, [])
    )


def packed(layers: Shapes) -> list[tuple[str, list[int], list[str]]]:
    """Return the rows of one architecture as the file has them."""
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
    for each in (*numbers[1:], None):
        if each and each[:-1] == last[:-1] and each[-1] == last[-1] + 1:
            last = each
            continue
        if first:
            yield ".".join([*map(str, first[:-1]), f"{first[-1]}-{last[-1]}"])
        else:
            yield ""
        if each:
            first = last = each


def _named(template: str, places: list[str]) -> Iterator[str]:
    pieces = template.split("#")
    for place in places:
        if not place:
            yield template
            continue
        *outer, spread = place.split(".")
        start, _, end = spread.partition("-")
        for last in range(int(start), int(end) + 1):
            numbers = [*outer, str(last), ""]
            yield "".join(piece + number for piece, number in zip(pieces, numbers, strict=True))
