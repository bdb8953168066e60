"""The layers of denoisers by name, without torch: shapes in the public releases, names in others' files.

`scripts/write_layer_tables.py` writes `layer_tables.json` from the networks themselves: per family a list of
architectures, each as rows (template, shape, ranges). A template is a layer's name with `#` for each number;
a range is "0.3-7": all numbers but the last, then the first and last value of the last number.
`transformer_names.toml` maps names in adapter files and checkpoints to the diffusers layers they stand for.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lora_trainer.families.facts import OtherNames

FILE = Path(__file__).with_name("layer_tables.json")
NAMES = Path(__file__).with_name("transformer_names.toml")
Shapes = Mapping[str, tuple[int, ...]]
"""Layer name -> shape of its weight: [out, in, ...], or [width] of a norm."""
Row = tuple[str, list[int], list[str]]


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


# ---- names in files

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])")


@cache
def _templates(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return name in files -> diffusers layers, with `#` for each number."""
    table: Mapping[str, Any] = tomllib.loads(NAMES.read_text(encoding="utf-8"))
    family_rows = dict(table["families"][family])
    rows: dict[str, str] = {}
    for group in family_rows.pop("groups"):
        rows |= table["groups"][group]
    return {
        name: tuple(layers.format(**table["parts"]).split())
        for name, layers in {**rows, **family_rows}.items()
    }


def other_names(family: str, layers: Iterable[str], *, swapped: frozenset[str]) -> OtherNames:
    """Return the family's names of existing `layers`, with numbers in place of `#`."""
    by_template: dict[str, list[tuple[str, ...]]] = {}
    present = dict.fromkeys(layers)  # in the order of the layers, unlike a set
    for layer in present:
        numbers = tuple(_NUMBER.findall(layer))
        by_template.setdefault(_NUMBER.sub("#", layer), []).append(numbers)
    filled: dict[str, tuple[str, ...]] = {}
    for name, parts in _templates(family).items():
        # The 1 of `linear_1` counts as a number too, so `linear_2` comes to the same template and
        # fills the same entry a second time, which changes nothing.
        for numbers in by_template.get(_NUMBER.sub("#", parts[0]), ()):
            joined = tuple(_filled(part, numbers) for part in parts)
            # A fused name whose layers are not all there would stand for other rows.
            if present.keys() >= set(joined):
                filled[_filled(name, numbers)] = joined
    return OtherNames(layers=filled, swapped=swapped)


def _filled(template: str, numbers: tuple[str, ...]) -> str:
    """Fill a layer's numbers into a template, the block's number first; surplus numbers are ignored."""
    for number in numbers[: template.count("#")]:
        template = template.replace("#", number, 1)
    return template
