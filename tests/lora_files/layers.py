"""Layers of the public releases as the trainers see them: some blocks, in the releases' own names or in diffusers'.

Which rows of a joined layer are which layer of diffusers stands in the product's tables, which
tests/families/test_layer_names.py compares with diffusers' conversions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from lora_trainer import families
from lora_trainer.families.base.releases import released_layers
from tests.fakes.original_names import ORIGINAL

UNET = re.compile(r"(?:input_blocks|middle_block|output_blocks|time_embed|label_emb)\.")


@dataclass(frozen=True)
class Layer:
    """One weight of the release: `parts` are (diffusers' name, outputs) in the order of its rows."""

    name: str
    parts: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]

    @property
    def out(self) -> int:
        return sum(out for _, out in self.parts)

    def split(self) -> list[Layer]:
        """Return the same as diffusers has it: a layer for each part, in its own names."""
        return [Layer(name, ((name, out),), self.inputs) for name, out in self.parts]


@cache
def _layers(family: str, number: int) -> tuple[Layer, ...]:
    """Return all layers of a release, in the names of its own code."""
    shapes = released_layers(family)[number]
    other = families.family(family).layer_names(shapes)
    own = {
        name: tuple(layers)
        for name, layers in other.layers.items()
        if (ORIGINAL.match(name) or UNET.match(name)) and not other.swapped & set(layers)
    }
    covered = {layer for layers in own.values() for layer in layers}
    own |= {name: (name,) for name in shapes if name not in covered}
    return tuple(
        Layer(name, tuple((each, shapes[each][0]) for each in layers), shapes[layers[0]][1:])
        for name, layers in own.items()
    )


def release(family: str, names: str, *, number: int = 0, dimensions: int = 2) -> list[Layer]:
    """Return the layers whose name in the release's own code matches; norms have one dimension."""
    return [
        layer
        for layer in _layers(family, number)
        if re.match(names, layer.name) and 1 + len(layer.inputs) >= dimensions
    ]


def text(family: str, component: str = "text_encoder", *, prefix: str = "") -> list[Layer]:
    """Return the layers of one block of a text encoder; transformers had a prefix before their names."""
    return [
        Layer(prefix + name, ((name, shape[0]),), shape[1:])
        for name, shape in families.family(family).text.layers[component].items()
        if re.search(r"(?:layers|block)\.3\.", name) and len(shape) > 1
    ]
