"""The place of each layer's weight in single-file checkpoints of the U-Net families, from the header alone.

Input is a header in the layout of ComfyUI and A1111, or with diffusers' names; output "component.module"
in diffusers' names -> tensor. The header itself shows the number of resnets and the attention of each
level, so no configuration is needed. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lora_trainer.families.base import DENOISER, Header, WeightPlace
from lora_trainer.families.clip import TEXT_MODEL, ClipPart
from lora_trainer.families.single_file import unet_names
from lora_trainer.families.unet_names import diffusers_module

WEIGHT = ".weight"
_DOWN = re.compile(r"input_blocks\.(\d+)\.(?:(0)\.in_layers\.0|(1)\.norm|(0)\.op)\.weight")
_OPEN_CLIP = {
    "attn.out_proj.weight": "self_attn.out_proj",
    "mlp.c_fc.weight": "mlp.fc1",
    "mlp.c_proj.weight": "mlp.fc2",
    "ln_1.weight": "layer_norm1",
    "ln_2.weight": "layer_norm2",
}
_OPEN_CLIP_ENDS = {
    "token_embedding.weight": "embeddings.token_embedding",
    "positional_embedding": "embeddings.position_embedding",
    "ln_final.weight": "final_layer_norm",
}
_OPEN_CLIP_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")
_FUSED = "attn.in_proj_weight"


def weight_places(header: Header, texts: Iterable[ClipPart]) -> dict[str, WeightPlace]:
    """Return the place of each weight of the U-Net and the text encoders in a checkpoint, norms included."""
    places = dict(_unet_places(header))
    for text in texts:
        places |= dict(_text_places(header, text))
    return places


def _unet_places(header: Header) -> Iterator[tuple[str, WeightPlace]]:
    names = unet_names(header)
    architecture = None if "conv_in.weight" in names else _architecture(names)
    for name, full in names.items():
        module = name.removesuffix(WEIGHT)
        if module == name:
            continue
        try:
            ours = (
                module
                if architecture is None
                else diffusers_module(module, architecture=architecture)
            )
        except KeyError:
            continue  # a tensor of the file that is no module of the U-Net
        yield f"{DENOISER}.{ours}", WeightPlace(tensor=full)


def _architecture(names: Iterable[str]) -> Mapping[str, Any]:
    """Return the part of diffusers' configuration that decides the block numbers, from a file's names."""
    resnets, attended = [0], [False]
    blocks = sorted(
        (int(match[1]), match.lastindex or 0) for name in names if (match := _DOWN.fullmatch(name))
    )
    for _, kind in blocks:
        match kind:
            case 2:
                resnets[-1] += 1
            case 3:
                attended[-1] = True
            case 4:
                resnets.append(0)
                attended.append(False)
    down = ["CrossAttnDownBlock2D" if attends else "DownBlock2D" for attends in attended]
    up = ["CrossAttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(attended)]
    return {
        "block_out_channels": [1] * len(resnets),  # names depend on the number of levels only
        "layers_per_block": resnets,
        "down_block_types": down,
        "up_block_types": up,
    }


def _text_places(header: Header, text: ClipPart) -> Iterator[tuple[str, WeightPlace]]:
    open_clip = text.checkpoint.endswith(".model.")
    for full, info in header.items():
        name = full.removeprefix(text.checkpoint)
        if name == full or not info.shape:
            continue
        modules = (
            _open_clip_modules(name, height=info.shape[0]) if open_clip else _clip_module(name)
        )
        for module, rows in modules:
            yield f"{text.component}.{module}", WeightPlace(tensor=full, rows=rows)


def _clip_module(name: str) -> Iterator[tuple[str, None]]:
    module = name.removeprefix(TEXT_MODEL).removesuffix(WEIGHT)
    if name.endswith(WEIGHT):
        yield module, None


def _open_clip_modules(name: str, *, height: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield transformers' modules in an OpenCLIP tensor of `height` rows, each with its rows.

    OpenCLIP keeps query, key and value of a layer in one matrix, in this order.
    """
    layer = _OPEN_CLIP_LAYER.fullmatch(name)
    if layer is None:
        if module := _OPEN_CLIP_ENDS.get(name):
            yield module, None
    elif layer[2] == _FUSED:
        width = height // 3
        for number, projection in enumerate("qkv"):
            rows = (number * width, (number + 1) * width)
            yield f"encoder.layers.{layer[1]}.self_attn.{projection}_proj", rows
    elif module := _OPEN_CLIP.get(layer[2]):
        yield f"encoder.layers.{layer[1]}.{module}", None
