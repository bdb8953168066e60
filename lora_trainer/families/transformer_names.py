"""Names of the diffusion transformers' layers in adapter files, where they differ from diffusers' names.

`transformer_names.toml` maps a name in such files to the diffusers layers it stands for; torch-free.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.traits import OtherNames

FILE = Path(__file__).with_suffix(".toml")
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])")


@cache
def _templates(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return name in files -> diffusers layers, with `#` for each number."""
    table: Mapping[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    own = dict(table["families"][family])
    rows: dict[str, str] = {}
    for group in own.pop("groups"):
        rows |= table["groups"][group]
    return {
        name: tuple(layers.format(**table["parts"]).split())
        for name, layers in {**rows, **own}.items()
    }


def other_names(family: str, layers: Iterable[str], *, swapped: frozenset[str]) -> OtherNames:
    """Return the family's names of existing `layers`, with numbers in place of `#`."""
    by_template: dict[str, list[tuple[str, ...]]] = {}
    present = set(layers)
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
            if present.issuperset(joined):
                filled[_filled(name, numbers)] = joined
    return OtherNames(layers=filled, swapped=swapped)


def _filled(template: str, numbers: tuple[str, ...]) -> str:
    """Fill a layer's numbers into a template, the block's number first; surplus numbers are ignored."""
    for number in numbers[: template.count("#")]:
        template = template.replace("#", number, 1)
    return template
