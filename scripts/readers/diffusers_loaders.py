"""What diffusers makes of exported files: `python -m scripts.readers.diffusers_loaders`.

Runs the installed library's own loader mixins and merges what they loaded.
"""

from __future__ import annotations

import copy
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
    """Load a file as `load_lora_weights` does, part by part, and merge it into copies."""
    mixin: Any = getattr(lora_pipeline, MIXINS[base.family.name])
    denoiser = copy.deepcopy(base.denoiser)
    texts = {component: copy.deepcopy(network) for component, network in base.texts.items()}
    try:
        if base.texts:
            state, alphas, metadata = mixin.lora_state_dict(
                str(file), unet_config=denoiser.config, return_lora_metadata=True
            )
            mixin.load_lora_into_unet(
                state, network_alphas=alphas, unet=denoiser, metadata=metadata
            )
            for component, network in texts.items():
                mixin.load_lora_into_text_encoder(
                    state, network_alphas=alphas, text_encoder=network, prefix=component
                )
        elif "Flux" in MIXINS[base.family.name] and base.family.name != "flux2":
            state, alphas = mixin.lora_state_dict(str(file), return_alphas=True)[:2]
            mixin.load_lora_into_transformer(state, network_alphas=alphas, transformer=denoiser)
        else:
            mixin.load_lora_into_transformer(mixin.lora_state_dict(str(file)), transformer=denoiser)
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
    run(read, name="diffusers", commit=f"{diffusers.__version__}, peft {peft.__version__}")
