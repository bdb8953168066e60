"""Layers of the public releases as the trainers see them: some blocks, in the releases' own names or in diffusers'.

Which rows of a joined layer are which layer of diffusers stands in the product's tables, which
tests/families/test_layer_names.py compares with diffusers' conversions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_trainer import families
from lora_trainer.families.releases import released_layers
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


def release(family: str, names: str, *, number: int = 0, dimensions: int = 2) -> list[Layer]:
    """Return the layers whose name in the release's own code matches; norms have one dimension."""
    shapes = released_layers(family)[number]
    other = families.family(family).layer_names(shapes)
    own = {
        name: tuple(layers)
        for name, layers in other.layers.items()
        if (ORIGINAL.match(name) or UNET.match(name)) and not other.swapped & set(layers)
    }
    covered = {layer for layers in own.values() for layer in layers}
    own |= {name: (name,) for name in shapes if name not in covered}
    return [
        Layer(name, tuple((each, shapes[each][0]) for each in layers), shapes[layers[0]][1:])
        for name, layers in own.items()
        if re.match(names, name) and len(shapes[layers[0]]) >= dimensions
    ]


def text(family: str, component: str = "text_encoder", *, prefix: str = "") -> list[Layer]:
    """Return the layers of one block of a text encoder; transformers had a prefix before their names."""
    return [
        Layer(prefix + name, ((name, shape[0]),), shape[1:])
        for name, shape in families.family(family).text.layers[component].items()
        if re.search(r"(?:layers|block)\.3\.", name) and len(shape) > 1
    ]


def clip(family: str, component: str = "text_encoder") -> list[Layer]:
    return text(family, component, prefix="text_model.")


FLUX = release("flux", r"double_blocks\.(0|18)\.|single_blocks\.37\.")
FLUX_IN = release("flux", r"img_in|txt_in|time_in\.in|guidance_in\.out|vector_in\.in")
CHROMA = release("chroma", r"double_blocks\.3\.|single_blocks\.5\.")
FLUX2_4B = release("flux2", r"double_blocks\.4\.|single_blocks\.19\.")
FLUX2_9B = release("flux2", r"double_blocks\.7\.|single_blocks\.23\.", number=1)
SD3_MEDIUM = release("sd3", r"joint_blocks\.0\.")
SD3_LARGE = release("sd3", r"joint_blocks\.30\.", number=1)
SD3_OUTER = release(
    "sd3", r"context_embedder$|t_embedder\.mlp\.0|x_embedder|y_embedder\.mlp\.2|final_layer\.linear"
)
ZIMAGE = release("zimage", r"layers\.29\.|noise_refiner\.1\.|context_refiner\.0\.")
QWEN = release("qwen", r"transformer_blocks\.(0|59)\.")
SD15 = release(
    "sd15", r"(input_blocks\.1\.1|middle_block\.1|output_blocks\.9\.1)\.(proj_|.*(attn|ff))"
)
SD2 = release("sd2", r"(input_blocks\.4\.1|output_blocks\.11\.1)\.(proj_|.*(attn|ff))")
SDXL = release(
    "sdxl", r"(input_blocks\.4\.1|middle_block\.1|output_blocks\.5\.1)\.(proj_|.*[01]\.(attn|ff))"
)
KERNELS = r"input_blocks\.(1\.0\.in_layers\.2|1\.0\.emb_layers\.1|3\.0\.op|4\.0\.skip_connection)"
