"""What ComfyUI makes of exported files: `python -m scripts.readers.comfyui --checkout DIR --commit SHA`.

Runs ComfyUI's own conversion, key maps, adapters and weight patching on the CPU, on narrow networks
in the layout that it holds. Needs its packages torchsde, einops, comfy-kitchen and comfy-aimdo.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.readers.cases import Reading, arguments, run
from scripts.readers.networks import Base
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name

UNUSED = (
    *("torchvision", "torchaudio", "kornia", "spandrel", "av", "aiohttp", "alembic", "sqlalchemy"),
    *("yarl", "simpleeval", "blake3", "folder_paths", "server", "execution", "nodes"),
)
CLASSES = {
    "sd15": "BaseModel",
    "sd2": "BaseModel",
    "sdxl": "SDXL",
    "sd3": "SD3",
    "flux": "Flux",
    "flux2": "Flux2",
    "chroma": "Chroma",
    "zimage": "Lumina2",
    "lumina2": "Lumina2",
    "qwen": "QwenImage",
}
TEXTS = {
    "sd15": {"text_encoder": "clip_l"},
    "sd2": {"text_encoder": "clip_h"},
    "sdxl": {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def read(file: Path, base: Base) -> Reading:
    """Patch a base as the node that loads a LoRA does."""
    import comfy.lora
    import comfy.lora_convert
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    model, clip = model_of(base), _clip(base)
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    try:
        keys = comfy.lora.model_lora_keys_unet(model, {})
        if base.texts:
            keys = comfy.lora.model_lora_keys_clip(clip, keys)
        loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(load_file(file)), keys)
        patchers = [
            ModelPatcher(part, load_device=cpu, offload_device=cpu) for part in (model, clip)
        ]
        taken = {key for patcher in patchers for key in patcher.add_patches(loaded, 1.0)}
        for patcher in patchers:
            for key in [*patcher.patches]:
                patcher.patch_weight_to_device(key)
    finally:
        logging.getLogger().removeHandler(warnings)
    unread = [*warnings.messages, *(str(key) for key in loaded.keys() - taken)]
    return Reading(unread=unread, weights=_weights(base, model, clip))


def model_of(base: Base) -> Any:
    """Return a model of ComfyUI's class that is nothing but its tensors."""
    import comfy.model_base
    import comfy.model_detection

    kind = getattr(comfy.model_base, CLASSES[base.family.name])
    model = type(kind.__name__, (Tree, kind), {"__init__": Tree.__init__})()
    original = base.original()
    model.hold({f"diffusion_model.{name}": tensor for name, tensor in original.items()})
    config: Any = base.denoiser.config
    match base.family.name:
        case "flux" | "flux2" | "chroma":
            sizes = {
                "depth": config.num_layers,
                "depth_single_blocks": config.num_single_layers,
                "hidden_size": config.num_attention_heads * config.attention_head_dim,
            }
        case "sd3":
            sizes = {"depth": config.num_layers}
        case "zimage":
            sizes = {
                "n_layers": config.n_layers,
                "n_refiner_layers": config.n_refiner_layers,
                "dim": config.dim,
            }
        case "lumina2":
            sizes = {
                "n_layers": config.num_layers,
                "n_refiner_layers": config.num_refiner_layers,
                "dim": config.hidden_size,
            }
        case "qwen":
            sizes = {}
        case _:
            sizes = comfy.model_detection.detect_unet_config(original, "")
    model.model_config = SimpleNamespace(unet_config=sizes)
    return model


def _clip(base: Base) -> Tree:
    clip = Tree()
    for component, network in base.texts.items():
        prefix = TEXTS[base.family.name][component] + ".transformer."
        clip.hold(
            {prefix + clip_name(name): tensor for name, tensor in network.state_dict().items()}
        )
    return clip


def _weights(base: Base, model: nn.Module, clip: nn.Module) -> dict[str, Tensor]:
    patched = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    found = {}
    for name, place in base.places.items():
        if name.endswith(".weight"):
            whole = patched[f"diffusion_model.{place.name}"]
            key = f"denoiser.{name.removesuffix('.weight')}"
            found[key] = whole[place.start : place.start + place.rows]
    texts = clip.state_dict()
    for component, network in base.texts.items():
        prefix = TEXTS[base.family.name][component] + ".transformer."
        for name, _ in network.named_parameters():
            if name.endswith(".weight"):
                found[f"{component}.{name.removesuffix('.weight')}"] = texts[
                    prefix + clip_name(name)
                ].detach()
    return found


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    stand_in(*UNUSED)
    sys.path.insert(0, str(given.checkout))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    run(read, name="ComfyUI", commit=given.commit, only=given.family)
