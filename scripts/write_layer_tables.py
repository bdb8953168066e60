"""Writes the tables of the public releases' layers: `python -m scripts.write_layer_tables`.

Networks are built on `meta`, without weights; releases of one architecture share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from lora_trainer import families
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.releases import Row
from scripts.made_tables import write_made

# `blocks.1.` and `linear_1` get `#`; the digit of `w1` belongs to its letter and stays.
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?=\.|$)")


def layers_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a file could change, by layer, in module order."""
    return {
        name: tuple(module.weight.shape)
        for name, module in network.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and not isinstance(module, nn.Embedding)
    }


def packed(layers: Mapping[str, tuple[int, ...]]) -> list[Row]:
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


def layer_rows(family: Family) -> list[list[Row]]:
    """Return the rows of each architecture of a family's releases."""
    tables: list[list[Row]] = []
    for release in family.published:
        with torch.device("meta"):
            rows = packed(layers_of(family.empty_denoiser(release.architecture)))
        if rows not in tables:
            tables.append(rows)
    return tables


def main() -> None:
    """Write `layers` of the tables.json of every family."""
    for name in families.NAMES:
        write_made(name, layers=layer_rows(families.family(name)))


if __name__ == "__main__":
    main()
