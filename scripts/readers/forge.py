"""What Forge makes of exported files: `python -m scripts.readers.forge --checkout DIR --commit SHA`.

Runs Forge's own key maps and weight merging on the CPU, on narrow networks in the layout it holds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from scripts.readers.cases import Reading, arguments, run
from scripts.readers.networks import Base
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name

TEXTS = {
    "sd15": {"text_encoder": "clip_l"},
    "sd2": {"text_encoder": "clip_h"},
    "sdxl": {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
}
REPOSITORIES = {
    "sd15": "runwayml/stable-diffusion-v1-5",
    "sd2": "stabilityai/stable-diffusion-2-1",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "stabilityai/stable-diffusion-3-medium-diffusers",
    "flux": "black-forest-labs/FLUX.1-dev",
    "chroma": "Chroma",
}
"""What Forge's loader calls the models it knows."""


def read(file: Path, base: Base) -> Reading:
    """Patch a base as Forge's LoRA extension does: the denoiser's keys first, then the text encoders'."""
    from backend.patcher.lora import (
        load_lora,
        merge_lora_to_weight,
        model_lora_keys_clip,
        model_lora_keys_unet,
    )

    if base.family.name not in REPOSITORIES:
        return Reading(refused="Forge has no such model")
    model, clip = _model(base), _clip(base)
    patches, rest = load_lora(load_file(file), model_lora_keys_unet(model, {}))
    if base.texts:
        text_patches, rest = load_lora(rest, model_lora_keys_clip(clip, {}))
        patches |= text_patches
    patched: dict[str, Tensor] = {**model.state_dict(), **clip.state_dict()}
    unread = [*rest]
    for key, patch in patches.items():
        name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
        if name not in patched:
            unread.append(name)
            continue
        patched[name] = merge_lora_to_weight(
            [(1.0, patch, 1.0, offset, function)], patched[name], name
        )
    return Reading(unread=unread, weights=_weights(base, patched))


def _model(base: Base) -> Any:
    model: Any = Tree().hold(
        {f"diffusion_model.{name}": tensor for name, tensor in base.original().items()}
    )
    config: Any = base.denoiser.config
    match base.family.name:
        case "flux" | "chroma":
            sizes = {
                "depth": config.num_layers,
                "depth_single_blocks": config.num_single_layers,
                "hidden_size": config.num_attention_heads * config.attention_head_dim,
            }
        case "sd3":
            sizes = {"depth": config.num_layers}
        case _:
            sizes = _unet_sizes(base)
    model.config = SimpleNamespace(huggingface_repo=REPOSITORIES[base.family.name])
    model.diffusion_model.config = sizes
    return model


def _unet_sizes(base: Base) -> dict[str, Any]:
    """What Forge's loader knows of the releases of Stable Diffusion and SDXL."""
    if base.family.name == "sdxl":
        return {
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
        }
    return {
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
    }


def _clip(base: Base) -> Tree:
    clip = Tree()
    for component, network in base.texts.items():
        prefix = TEXTS[base.family.name][component] + ".transformer."
        clip.hold(
            {prefix + clip_name(name): tensor for name, tensor in network.state_dict().items()}
        )
    return clip


def _weights(base: Base, patched: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, place in base.places.items():
        if name.endswith(".weight"):
            whole = patched[f"diffusion_model.{place.name}"]
            rows = whole[place.start : place.start + place.rows]
            found[f"denoiser.{name.removesuffix('.weight')}"] = rows
    for component, network in base.texts.items():
        prefix = TEXTS[base.family.name][component] + ".transformer."
        for name, _ in network.named_parameters():
            if name.endswith(".weight"):
                key = f"{component}.{name.removesuffix('.weight')}"
                found[key] = patched[prefix + clip_name(name)]
    return found


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    stand_in("modules", "modules_forge", "gradio")
    sys.path.insert(0, str(given.checkout))
    sys.argv = [sys.argv[0], "--always-cpu"]
    run(read, name="Forge", commit=given.commit, only=given.family)
