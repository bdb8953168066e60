"""What is published, without torch: releases of bases, their text encoders, the layers of the networks by name.

family.toml of a family lists its releases, and the text encoders, VAEs and licences that it brings; those that several
families use are in shared_parts.toml. The `layers` of a tables.json are made from the networks themselves: a list of
architectures, each as rows (template, shape, ranges). A template is a layer's name with `#` for each number; a range
is "0.3-7": all numbers but the last, then the first and last value of the last number. `adapters.names` of a
family.toml and the groups of transformer_names.toml map names in adapter files and checkpoints to the diffusers layers
they stand for.

Names of text encoders' layers are those of transformers without the prefixes `text_model.`, `model.` and
`language_model.`, which some versions of transformers and some trainers add and others leave out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.base.facts import Assistant, BaseRelease, Licence, SamplingRecipe
from lora_trainer.families.base.layout import PARTS
from lora_trainer.families.base.tables import family_names, family_table, made_tables
from lora_trainer.families.base.traits import OtherNames

# Layer name -> shape of its weight: [out, in, ...], or [width] of a norm.
Shapes = Mapping[str, tuple[int, ...]]
Row = tuple[str, list[int], list[str]]


# Keys of a release that say how it is shown, not what it is: a sentence, the same in other languages by code, what it
# is chosen for (people, anime, photos, text; the most usual first), its place among all releases, the formula of
# scripts/timestep_table.py that it is compared with, the machine's memory that scripts/plan_tables.py assumes for it.
SHOWN = ("good_for", "good_for_in", "subjects", "offered", "timesteps", "ram_gib")


@cache
def _table_beside(name: str) -> Mapping[str, Any]:
    """Return the contents of a TOML file of this folder."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    table: Mapping[str, Any] = tomllib.loads(text)
    return table


def part_rows(table: str) -> Iterator[tuple[str, Any]]:
    """Yield name and row of each text encoder, VAE or licence, as `table` says: shared ones first.

    The family.toml of a family is read when the rows before it have been passed over.
    """
    yield from _table_beside("shared_parts.toml")[table].items()
    for family in family_names():
        yield from family_table(family).get(table, {}).items()


def part_row(table: str, name: str) -> Any:
    """Return the row of that name, None where nothing states one."""
    return next((row for stated, row in part_rows(table) if stated == name), None)


@cache
def released(family: str) -> tuple[BaseRelease, ...]:
    """Return the public releases of a family, from its family.toml."""
    shared = {key: value for key, value in family_table(family)["shared"].items() if key != "drawn"}
    releases = []
    for shown_row in family_table(family)["releases"]:
        row = {key: value for key, value in shown_row.items() if key not in SHOWN}
        # Tables of the family and of the release are joined, plain values replaced.
        values = shared | {
            key: {**shared.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in row.items()
        }
        vae = dict(part_row("vaes", values["vae"]))
        sizes = {**values["parameters"], "vae": vae.pop("parameters")}
        licence = part_row("licences", values["licence"]) if "licence" in values else None
        values |= {
            "vae": vae,
            "architecture": {
                key: None if value == "none" else value
                for key, value in values["architecture"].items()
            },
            "parameters": {part: sizes[part] for part in PARTS},
            "drawing": SamplingRecipe(**values["drawing"]),
            "licence": Licence(**licence) if licence else None,
            "assistant": Assistant(**values["assistant"]) if "assistant" in values else None,
        }
        releases.append(BaseRelease(**values))
    return tuple(releases)


def few_step_drawing(family: str, kind: str) -> SamplingRecipe:
    """Return how a base of a family that was distilled in that way is drawn, as "any" where its kind has no row."""
    rows = family_table(family)["shared"]["drawn"]
    return SamplingRecipe(**(rows.get(kind) or rows["any"]))


# ---- text encoders


@dataclass(frozen=True, kw_only=True)
class TextNetwork:
    """A text encoder as released.

    `role` is ComfyUI's name of it, `kind` that of `signatures.toml`, `network` its class in transformers,
    `width` the length of its hidden states; `parameters` are those that are loaded,
    `sizes` what the shapes of its layers follow from beside the width.
    """

    role: str
    kind: str
    network: str
    width: int
    parameters: int
    sizes: Mapping[str, int]
    layers: Shapes


def text_layers(kind: str, **sizes: int) -> Shapes:
    """Return the layers of an encoder of that kind with `layers` blocks, in the order of its table.

    A kind without a table has the layers of a language model.
    """
    rows: Mapping[str, Sequence[str]] = part_row("text_layers", kind) or part_row(
        "text_layers", "language_model"
    )
    shapes = {name: tuple(sizes[size] for size in shape) for name, shape in rows.items()}
    blocks = {
        name.replace("#", str(number)): shape
        for number in range(sizes["layers"])
        for name, shape in shapes.items()
        if "#" in name
    }
    return blocks | {name: shape for name, shape in shapes.items() if "#" not in name}


@cache
def text_network(role: str) -> TextNetwork:
    """Return the text encoder of that name; raises KeyError where nothing states it."""
    row = part_row("text_encoders", role)
    if row is None:
        raise KeyError(role)
    layers = text_layers(row["kind"], width=row["width"], **row["sizes"])
    return TextNetwork(role=role, layers=layers, **row)


# Stable Diffusion 3 reads CLIP-L's pooled vector after the projection.
CLIP_L_PROJECTED = replace(
    text_network("clip_l"), network="CLIPTextModelWithProjection", parameters=123_650_304
)


# ---- layers of denoisers


@cache
def released_layers(family: str) -> tuple[Shapes, ...]:
    """Return the layers of each released architecture of a family, () for an unknown family."""
    return tuple(unpacked(rows) for rows in made_tables(family).get("layers", []))


def unpacked(rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
    """Return the layers of one architecture from rows (template, shape, ranges) of the file."""
    layers: dict[str, tuple[int, ...]] = {}
    for template, shape, ranges in rows:
        for range_text in ranges:
            *outer, spread = range_text.split(".")
            start, _, end = spread.partition("-")
            # A template without a number has one range, the empty text.
            for last in range(int(start), int(end) + 1) if spread else ("",):
                layers[_filled(template, (*outer, str(last)))] = tuple(shape)
    return layers


# ---- names in files

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])")


@cache
def _templates(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return name in files -> diffusers layers, with `#` for each number."""
    table = _table_beside("transformer_names.toml")
    family_rows = dict(family_table(family)["adapters"]["names"])
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
