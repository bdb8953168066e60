"""LoRA files as trainers write them: keys and tensors by the rules in their code, at the versions named.

`CASES` is the corpus: one file for each spelling of a family's layers, and one for each kind of adapter. A `Part`
of a file is some layers in one spelling and one kind. Facts: sd-scripts 48d368f, musubi-tuner 30c658c, OneTrainer
23df383, ai-toolkit 27a03a9, SimpleTuner bc8e6ab, DiffSynth-Studio fed7b18, x-flux, LyCORIS f49d30d, diffusers 58eb52c.
"""

from __future__ import annotations

import math
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files import kinds as k
from tests.lora_files import layers as a
from tests.lora_files.kinds import Written
from tests.lora_files.layers import Layer

Spell = Callable[[str], str]


def spelling(prefix: str, rules: Iterable[tuple[str, str]] = ()) -> Spell:
    """Return what puts a prefix before names; one that ends with `_` makes them flat.

    `rules` are pairs of a pattern in the names and its replacement.
    """

    def spell(name: str) -> str:
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        name = f"{prefix}{name}"
        return name.replace(".", "_") if prefix.endswith("_") else name

    return spell


@dataclass(frozen=True)
class Part:
    """Some layers of one component, how their names are spelt, and what is written for each."""

    layers: Iterable[Layer]
    spell: Spell
    kind: k.Kind
    component: str = "denoiser"


@dataclass(frozen=True)
class Case:
    """One file: `refused` is why the tools cannot read it layer by layer, "" where they can."""

    name: str
    family: str
    parts: tuple[Part, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def split(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers in diffusers' names, joined ones apart: SD 1 and 2 have them in kohya's files too."""
    return [part for layer in layers for part in layer.split()]


LISTING = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))


def kind_of(kind: str | Mapping[str, Mapping[str, Any]]) -> k.Kind:
    """Return a kind of files.toml: a function of `kinds`, or one by its name, where given with more options."""
    ((name, options),) = {kind: {}}.items() if isinstance(kind, str) else kind.items()
    if name in LISTING["kinds"]:
        ((name, own),) = LISTING["kinds"][name].items()
        options = {**own, **options}
    if name == "bare":
        return k.lora(alpha=None, **options)
    write: k.Kind = getattr(k, name)(**options)
    return write


def layers_of(part: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a part in files.toml: of `layers`, a release or a text encoder.

    `rows_of` says how many parts of a joined layer the file has.
    """
    if "layers" in part:
        layers = layers_of(LISTING["layers"][part["layers"]])
    elif "text" in part:
        encoder = part.get("encoder", "text_encoder")
        layers = a.text(part["text"], encoder, prefix=part.get("prefix", ""))
    else:
        options = {key: part[key] for key in ("number", "dimensions") if key in part}
        layers = a.release(
            part["release"], LISTING["names"].get(part["names"], part["names"]), **options
        )
    layers = split(layers) if part.get("split") else layers
    ends = tuple(part.get("ends", ("",)))
    layers = [layer for layer in layers if layer.name.endswith(ends)]
    layers = layers[slice(*part.get("slice", (None,)))]
    layers = [replace(each, parts=each.parts[: part.get("rows_of")]) for each in layers]
    assert layers, part
    return layers


def listed() -> Iterable[Case]:
    """Yield the files of files.toml; one with `ways` is a file for each of these kinds."""
    for file in LISTING["file"]:
        ways, name = file.pop("ways", {"": ""}), file.pop("name")
        for way, kind in ways.items():
            parts = []
            for part in file["parts"]:
                own = kind if part["kind"] == "WAY" else part["kind"]
                spell = spelling(part["spelt"], part.get("renamed", ()))
                component = part.get("component", "denoiser")
                parts.append(Part(layers_of(part), spell, kind_of(own), component))
            yield Case(name.replace("WAY", way), **{**file, "parts": tuple(parts)})


CASES: tuple[Case, ...] = tuple(listed())


# ---- files, and what each layer's weight must change by


LARGE = 2**24
"""Layers of more numbers than this are read, but not compared: their updates take a second each."""


@dataclass(frozen=True)
class Expected:
    """The rows of what was written for a layer that one layer in diffusers' names has."""

    written: Written
    layer: Layer
    rows: slice
    seed: int

    @cached_property
    def base_weight(self) -> Tensor:
        """The base's weight, made up, of the whole layer; zeros where the update does not read it."""
        shape = (self.layer.out, *self.layer.inputs)
        if not self.written.based:
            return torch.zeros(shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))

    @property
    def delta(self) -> Tensor:
        """What the weight changes by, float64."""
        return self.written.delta(self.base_weight, self.rows)

    @property
    def numbers(self) -> int:
        """How many numbers the layer's weight has."""
        return (self.rows.stop - self.rows.start) * math.prod(self.layer.inputs)


def build(case: Case, path: Path, *, most: int | None = None) -> dict[str, Expected]:
    """Write the file of a case; return what is expected by "component.layer".

    With only the first `most` layers of every part its names may fit several families: the header then
    says which, as kohya's trainers write it.
    """
    tensors, expected = dict[str, Tensor](), dict[str, Expected]()
    for part in case.parts:
        for layer in list(part.layers)[:most]:
            seed = zlib.crc32(f"{case.name}{part.component}{layer.name}".encode())
            written = part.kind(layer, torch.Generator().manual_seed(seed))
            spelt = part.spell(layer.name)
            for end, tensor in written.tensors.items():
                key = f"{spelt}{end}" if end.startswith("_") else f"{spelt}.{end}"
                assert key not in tensors
                tensors[key] = tensor.contiguous()
            begin = 0
            for name, out in layer.parts:
                rows = slice(begin, begin + out)
                expected[f"{part.component}.{name}"] = Expected(written, layer, rows, seed)
                begin += out
    for key, shape in case.extra.items():
        tensors[key] = torch.zeros(shape)
    stated = {} if most is None else {"ss_base_model_version": LISTING["stated"][case.family]}
    save_file(tensors, path, metadata={**case.metadata, **stated} or None)
    return expected


def some(expected: Mapping[str, Expected], *, most: int) -> dict[str, Expected]:
    """Return a few small layers of every kind and component, parts of joined ones first."""
    order = sorted(
        (key for key in expected if expected[key].numbers < LARGE),
        key=lambda key: (-len(expected[key].layer.parts), zlib.crc32(key.encode())),
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for key in order:
        groups.setdefault((key.partition(".")[0], expected[key].written.kind), []).append(key)
    first = [keys[0] for keys in groups.values()]
    return {key: expected[key] for key in list(dict.fromkeys([*first, *order]))[:most]}
