"""What diffusers makes of exported files: `python -m scripts.readers.diffusers_loaders [FAMILY ...]`.

Runs the installed library's own loader mixins and merges what they loaded.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import diffusers
import peft
from diffusers.loaders import lora_pipeline
from torch import Tensor, nn

from scripts.readers.cases import Reading, run
from scripts.readers.networks import Base

MIXINS = {
    "sd15": "StableDiffusionLoraLoaderMixin",
    "sd2": "StableDiffusionLoraLoaderMixin",
    "sdxl": "StableDiffusionXLLoraLoaderMixin",
    "sd3": "SD3LoraLoaderMixin",
    "flux": "FluxLoraLoaderMixin",
    "flux2": "Flux2LoraLoaderMixin",
    "chroma": "FluxLoraLoaderMixin",
    "zimage": "ZImageLoraLoaderMixin",
    "qwen": "QwenImageLoraLoaderMixin",
}


def read(file: Path, base: Base) -> Reading:
    """Load a file with `load_lora_weights` into copies, and merge it into them."""
    mixin: Any = getattr(lora_pipeline, MIXINS[base.family.name])
    pipeline = mixin()
    denoiser = copy.deepcopy(base.denoiser)
    pipeline.unet = pipeline.transformer = denoiser
    pipeline.components, pipeline.hf_device_map = {}, None
    texts = {component: copy.deepcopy(network) for component, network in base.texts.items()}
    for component in ("text_encoder", "text_encoder_2"):
        setattr(pipeline, component, texts.get(component))
    try:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    except (ValueError, IndexError, KeyError) as error:
        return Reading(refused=f"{type(error).__name__}: {error}".replace("\n", " "))
    weights: dict[str, Tensor] = {}
    for component, network in {"denoiser": denoiser, **texts}.items():
        weights |= {f"{component}.{name}": tensor for name, tensor in _merged(network).items()}
    return Reading(weights=weights)


def _merged(network: nn.Module) -> dict[str, Tensor]:
    """Return weights by module, with what an adapter adds."""
    found = {}
    for name, module in network.named_modules():
        if hasattr(module, "base_layer"):
            module.merge()  # type: ignore[operator]  # a layer of peft
            found[name] = module.get_base_layer().weight.detach()  # type: ignore[operator]
        elif isinstance(module, nn.Linear | nn.Conv2d) and "lora_" not in name:
            found[name] = module.weight.detach()
    return {name: weight for name, weight in found.items() if ".base_layer" not in name}


if __name__ == "__main__":
    versions = f"{diffusers.__version__}, peft {peft.__version__}"
    run(read, name="diffusers", commit=versions, only=sys.argv[1:])
