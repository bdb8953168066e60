"""Tensor names and shapes of base models in the layouts that their publishers use, at the released sizes.

Layers are those of each family's tables.json, under the names of its family.toml, which
tests/families/test_layer_names.py compares with diffusers' networks and conversions. Biases are left out.
"""

from __future__ import annotations

import re
from functools import cache

from lora_trainer import families
from lora_trainer.families.base.releases import released_layers, text_network
from tests.fakes.original_names import NORMS, ORIGINAL
from tests.fakes.tiny_base import tiny_table

Shapes = dict[str, tuple[int, ...]]
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CHECKPOINT_TEXTS = {
    "sd15": ("cond_stage_model.transformer.",),
    "sd2": ("cond_stage_model.model.",),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
}
_POSITIONS = {0: (384, 1536), 1: (192, 2432), 2: (192, 1536)}
"""Release of Stable Diffusion 3 -> side of its table of positions, width."""


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def without(shapes: Shapes, pattern: str) -> Shapes:
    """Return the tensors whose name the pattern does not begin."""
    return {name: shape for name, shape in shapes.items() if not re.match(pattern, name)}


@cache
def _network(family: str, release: int, original: bool) -> Shapes:
    layers = released_layers(family)[release]
    own = families.family(family).layer_names(layers).layers if original else {}
    own = {
        name: parts for name, parts in own.items() if family not in NORMS or ORIGINAL.match(name)
    }
    covered = {part for parts in own.values() for part in parts}
    names = {**own, **{layer: (layer,) for layer in layers if layer not in covered}}
    shapes: Shapes = {}
    for name, parts in names.items():
        key = f"{name}.weight"
        for pattern, new in NORMS.get(family, {}).items() if original else ():
            key = re.sub(pattern, new, key)
        shapes[key] = (sum(layers[part][0] for part in parts), *layers[parts[0]][1:])
    if family == "sd3":
        side, width = _POSITIONS[release]
        shapes["pos_embed" if original else "pos_embed.pos_embed"] = (1, side**2, width)
    if family == "sd2":  # the weight that shows its prediction, here of no deviation: epsilon
        block = "output_blocks.11.1" if original else "up_blocks.3.attentions.2"
        shapes[f"{block}.transformer_blocks.0.norm1.bias"] = (320,)
    for component, start in families.family(family).text.inside.items() if original else ():
        inner = families.family(family).text.layers[component]
        shapes |= {f"{start}{layer}.weight": shape for layer, shape in inner.items()}
    parameters = tiny_table(family)["tests"].get("parameters", {})
    shapes |= {name: tuple(shape) for name, shape in parameters.items()}
    return shapes


def network(family: str, release: int = 0, *, original: bool = True) -> Shapes:
    """Return the weights of a release's denoiser in its publisher's layout, or in diffusers'."""
    return dict(_network(family, release, original))


def whole_unet(family: str, shapes: Shapes) -> Shapes:
    """Return a checkpoint of A1111 and ComfyUI: U-Net, VAE and text encoders."""
    texts = {f"{prefix}x.weight": (8, 8) for prefix in CHECKPOINT_TEXTS[family]}
    return prefixed(UNET, shapes) | prefixed(VAE, vae()) | texts


def vae(latent: int = 4) -> Shapes:
    """Return the ends of an image VAE in both layouts: the names between them tell nothing."""
    return {"encoder.conv_in.weight": (128, 3, 3, 3), "decoder.conv_in.weight": (512, latent, 3, 3)}


def text(role: str) -> Shapes:
    """Return the weights of a text encoder in the names of its published file."""
    encoder = text_network(role)
    start = {"clip": "text_model.", "t5": ""}.get(encoder.kind, "model.")
    layers = {
        name: shape
        for name, shape in encoder.layers.items()
        if name != "text_projection" or role == "clip_g"
    }
    shapes = {
        f"{'' if name == 'text_projection' else start}{name}.weight": shape
        for name, shape in layers.items()
    }
    width = encoder.width
    match encoder.kind:
        case "clip":
            shapes["text_model.embeddings.token_embedding.weight"] = (49408, width)
        case "t5":
            shapes |= {"shared.weight": (32128, width), "encoder.final_layer_norm.weight": (width,)}
        case kind:
            shapes["model.layers.0.input_layernorm.weight"] = (width,)
            mark = {
                "qwen3": "self_attn.q_norm.weight",
                "gemma2": "post_feedforward_layernorm.weight",
            }
            shapes[f"model.layers.0.{mark.get(kind, 'self_attn.k_proj.bias')}"] = (width,)
    return shapes
