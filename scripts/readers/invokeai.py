"""What InvokeAI makes of exported files: `python -m scripts.readers.invokeai --checkout DIR --commit SHA`.

Runs InvokeAI's own recognition of the file, its conversions and its layer patcher on the CPU.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.readers.cases import Reading, arguments, run
from scripts.readers.networks import Base, Place
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name

PREFIXES = {
    "sd15": {"denoiser": "lora_unet_", "text_encoder": "lora_te_"},
    "sd2": {"denoiser": "lora_unet_", "text_encoder": "lora_te_"},
    "sdxl": {
        "denoiser": "lora_unet_",
        "text_encoder": "lora_te1_",
        "text_encoder_2": "lora_te2_",
    },
    **{name: {"denoiser": "lora_transformer-"} for name in ("flux", "flux2", "zimage", "qwen")},
}
BASES = {
    "sd15": "sd-1",
    "sd2": "sd-2",
    "sdxl": "sdxl",
    "flux": "flux",
    "flux2": "flux2",
    "zimage": "z-image",
    "qwen": "qwen-image",
}
FLUX_WIDTH = 3072
"""InvokeAI splits q, k and v of FLUX.1 at this width, whatever the network's."""


def prepare(base: Base) -> Base:
    """Give FLUX.1 as many rows as the release has; its columns stay few."""
    if base.family.name != "flux":
        return base
    config: Any = base.denoiser.config
    times = FLUX_WIDTH // (config.num_attention_heads * config.attention_head_dim)
    denoiser = Tree().hold(
        {
            name: tensor.repeat_interleave(times, dim=0)
            + 0.1 * torch.randn(tensor.shape[0] * times, *tensor.shape[1:])
            for name, tensor in base.denoiser.state_dict().items()
        }
    )
    places = {
        name: Place(name=place.name, start=place.start * times, rows=place.rows * times)
        for name, place in base.places.items()
    }
    return replace(base, denoiser=denoiser, places=places)


def read(file: Path, base: Base) -> Reading:
    """Recognise a file, load it and patch a base, as an invocation does."""
    from invokeai.backend.model_manager.configs.factory import ModelConfigFactory
    from invokeai.backend.model_manager.load.model_cache.torch_module_autocast.torch_module_autocast import (
        apply_custom_layers_to_model,
    )
    from invokeai.backend.model_manager.load.model_loaders.lora import LoRALoader
    from invokeai.backend.patches.layer_patcher import LayerPatcher
    from invokeai.backend.util.original_weights_storage import OriginalWeightsStorage

    name = base.family.name
    if name not in BASES:
        return Reading(refused="InvokeAI has no LoRAs for such a model")
    found: Any = ModelConfigFactory.from_model_on_disk(file, allow_unknown=False).config
    if found is None:
        return Reading(refused="not recognised as a LoRA")
    if found.base.value != BASES[name] or found.type.value != "lora":
        return Reading(refused=f"taken for {found.type.value} of {found.base.value}")
    loader = LoRALoader.__new__(LoRALoader)
    loader._model_base, loader._torch_dtype = found.base, torch.float32
    found.path = str(file)
    try:
        patch = loader._load_model(found)
    except (ValueError, AssertionError, KeyError) as error:
        return Reading(refused=f"{type(error).__name__}: {error}")
    weights: dict[str, Tensor] = {}
    for component, prefix in PREFIXES[name].items():
        network = _network(base, component)
        apply_custom_layers_to_model(network)
        LayerPatcher.apply_smart_model_patch(
            model=network,
            prefix=prefix,
            patch=patch,
            patch_weight=1.0,
            original_weights=OriginalWeightsStorage(),
            original_modules={},
            dtype=torch.float32,
            force_direct_patching=True,
            force_sidecar_patching=False,
        )
        weights |= _weights(base, component, network)
    return Reading(weights=weights)


def _network(base: Base, component: str) -> nn.Module:
    if component != "denoiser":
        state = base.texts[component].state_dict()
        return Tree().hold({clip_name(key): value for key, value in state.items()})
    if base.family.name == "flux":
        return Tree().hold(base.original())
    return copy.deepcopy(base.denoiser)


def _weights(base: Base, component: str, network: nn.Module) -> dict[str, Tensor]:
    state = network.state_dict()
    own = base.denoiser if component == "denoiser" else base.texts[component]
    found = {}
    for name, _ in own.named_parameters():
        if not name.endswith(".weight"):
            continue
        key = f"{component}.{name.removesuffix('.weight')}"
        if component != "denoiser":
            found[key] = state[clip_name(name)]
        elif base.family.name != "flux":
            found[key] = state[name]
        elif name in base.places:
            place = base.places[name]
            found[key] = state[place.name][place.start : place.start + place.rows]
    return found


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    stand_in("onnxruntime", "torchvision", "deprecated", "spandrel", "cv2", "onnx", "pyparsing")
    sys.path.insert(0, str(given.checkout))
    sys.argv = sys.argv[:1]
    run(read, name="InvokeAI", commit=given.commit, only=given.family, prepare=prepare)
