"""What sd-scripts makes of exported files: `python -m scripts.readers.sd_scripts --checkout DIR --commit SHA`.

Merges a file into sd-scripts' own U-Nets: LoRAs by its networks.lora, other kinds and DoRA by
LyCORIS, its network module for them (package lycoris-lora). Families without a U-Net are read by
names that are never written here.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.readers.cases import Reading, arguments, run
from scripts.readers.networks import Base
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name


def read(file: Path, base: Base) -> Reading:
    """Merge a file as `--network_weights` and `--base_weights` do."""
    if not base.texts:
        return Reading(refused="sd-scripts reads fused kohya names only")
    tensors = load_file(file)
    texts = [_text(network) for network in base.texts.values()]
    plain = all(key.endswith((".alpha", "lora_down.weight", "lora_up.weight")) for key in tensors)
    if plain:
        from networks import lora as reader  # type: ignore[import-not-found]
    else:
        from lycoris import kohya as reader  # type: ignore[import-not-found]
    # LyCORIS finds modules by their names alone.
    unet = _unet(base) if plain else Tree().hold(_tensors(base))
    given: Any = texts if len(texts) > 1 else texts[0]
    network, tensors = reader.create_network_from_weights(
        1.0, None, None, given, unet, weights_sd=tensors, for_inference=True
    )
    loras = [*network.unet_loras, *network.text_encoder_loras]
    names = {lora.lora_name for lora in loras}
    unread = [key for key in tensors if key.split(".")[0] not in names]
    if plain:
        network.merge_to(given, unet, tensors, torch.float32, "cpu")
    else:
        for lora in loras:
            lora.merge_to(1.0)
    return Reading(unread=unread, weights=_weights(base, unet, texts))


def _unet(base: Base) -> nn.Module:
    """sd-scripts' own class, so that its search by class names finds what it finds, with narrow tensors."""
    tensors = _tensors(base)
    with torch.device("meta"):
        if base.family.name != "sdxl":
            from library.original_unet import UNet2DConditionModel  # type: ignore[import-not-found]

            sd1 = base.family.name == "sd15"
            unet: nn.Module = UNet2DConditionModel(
                sample_size=64,
                attention_head_dim=8 if sd1 else [5, 10, 20, 20],
                cross_attention_dim=768 if sd1 else 1024,
                use_linear_projection=not sd1,
            )
        else:
            from library.sdxl_original_unet import SdxlUNet2DConditionModel  # type: ignore[import-not-found]

            unet = SdxlUNet2DConditionModel()
    for name, module in unet.named_modules():
        weight = tensors.get(f"{name}.weight")
        if weight is None or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        module.weight = nn.Parameter(weight.clone(), requires_grad=False)
        bias = tensors.get(f"{name}.bias")
        module.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        else:
            module.out_channels, module.in_channels = weight.shape[:2]
    return unet


def _tensors(base: Base) -> dict[str, Tensor]:
    """Its U-Net for SDXL has the checkpoint's names, the other one diffusers'."""
    return base.original() if base.family.name == "sdxl" else base.denoiser.state_dict()


def _text(network: nn.Module) -> nn.Module:
    """CLIP under the names of the transformers that sd-scripts pins."""
    if hasattr(network, "text_model"):
        return copy.deepcopy(network)
    root = nn.Module()
    root.add_module("text_model", copy.deepcopy(network))
    return root


def _weights(base: Base, unet: nn.Module, texts: list[nn.Module]) -> dict[str, Tensor]:
    state = dict(unet.named_parameters())
    found = {}
    for name, place in base.places.items():
        own = name if base.family.name != "sdxl" else place.name
        if name.endswith(".weight") and own in state and state[own].device.type != "meta":
            found[f"denoiser.{name.removesuffix('.weight')}"] = state[own].detach()
    for (component, network), text in zip(base.texts.items(), texts, strict=True):
        patched = dict(text.named_parameters())
        for name, _ in network.named_parameters():
            if name.endswith(".weight") and clip_name(name) in patched:
                key = f"{component}.{name.removesuffix('.weight')}"
                found[key] = patched[clip_name(name)].detach()
    return found


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    stand_in("torchvision", "cv2", "imagesize", "toml", "voluptuous")
    sys.path.insert(0, str(given.checkout))
    sys.argv = sys.argv[:1]
    run(read, name="sd-scripts", commit=given.commit, only=given.family)
