"""Names of a U-Net's layers in diffusers and in single files, and where files keep their weights.

The checkpoints' names come from the original code (Rombach et al. 2022, arXiv 2112.10752): blocks have
consecutive numbers, a resnet's layers have their index in a sequence. SDXL's LoRA files use these names
too. They follow from diffusers' configuration, or from a header alone, which shows the number of resnets
and the attention of each level. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from lora_trainer.families.base_files.unet_config import UNet, read_unet
from lora_trainer.families.base_files.unet_file import unet_names
from lora_trainer.families.facts import DENOISER, Header, WeightPlace
from lora_trainer.families.text.clip import TEXT_MODEL, ClipPart

_ENDS: Mapping[str, str] = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET: Mapping[str, str] = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_MIDDLE = ("resnets.0", "attentions.0", "resnets.1")


def ldm_module(module: str, *, architecture: Mapping[str, Any]) -> str:
    """Return the checkpoint's name of diffusers' module; raises KeyError for a module of another U-Net."""
    return _renamed(module, dict(_blocks(read_unet(architecture))), _ENDS, _RESNET)


def diffusers_module(ldm: str, *, architecture: Mapping[str, Any]) -> str:
    """Return diffusers' name of a checkpoint's module: the inverse of `ldm_module`; raises KeyError likewise."""
    blocks, ends, layers = (
        {theirs: ours for ours, theirs in pairs}
        for pairs in (_blocks(read_unet(architecture)), _ENDS.items(), _RESNET.items())
    )
    return _renamed(ldm, blocks, ends, layers)


def _renamed(
    module: str, blocks: Mapping[str, str], ends: Mapping[str, str], layers: Mapping[str, str]
) -> str:
    """Rename by tables of blocks, of layers outside blocks and of layers in resnets."""
    if module in ends:
        return ends[module]
    parts = module.split(".")
    # The longest matching block wins: `input_blocks.3.0.op` is a whole block (a downsampler).
    for count in range(len(parts), 0, -1):
        block, inner = ".".join(parts[:count]), ".".join(parts[count:])
        if block in blocks:
            is_resnet = "resnets" in block + blocks[block]
            renamed = layers[inner] if inner and is_resnet else inner
            return f"{blocks[block]}.{renamed}" if renamed else blocks[block]
    raise KeyError(module)


def checkpoint_names(
    modules: Iterable[str], *, architecture: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return checkpoint name -> (diffusers' module,), without modules that no release has."""
    blocks = dict(_blocks(read_unet(architecture)))
    modules_by_name: dict[str, tuple[str, ...]] = {}
    for module in modules:
        with suppress(KeyError):
            modules_by_name[_renamed(module, blocks, _ENDS, _RESNET)] = (module,)
    return modules_by_name


def _blocks(unet: UNet) -> Iterator[tuple[str, str]]:
    """Yield (diffusers' name, checkpoint's name) of every resnet, transformer and sampler."""
    last = len(unet.channels) - 1
    number = 1  # 0 is conv_in
    for level, resnets in enumerate(unet.resnets):
        for index in range(resnets):
            yield f"down_blocks.{level}.resnets.{index}", f"input_blocks.{number}.0"
            if unet.down_attention[level]:
                yield f"down_blocks.{level}.attentions.{index}", f"input_blocks.{number}.1"
            number += 1
        if level < last:
            yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    for middle, name in enumerate(_MIDDLE):
        yield f"mid_block.{name}", f"middle_block.{middle}"
    number = 0
    for up, resnets in enumerate(reversed(unet.resnets)):
        attention = unet.up_attention[up]
        for index in range(resnets + 1):  # one more than on the way down
            yield f"up_blocks.{up}.resnets.{index}", f"output_blocks.{number}.0"
            if attention:
                yield f"up_blocks.{up}.attentions.{index}", f"output_blocks.{number}.1"
            number += 1
        if up < last:  # in the same block as the level's last resnet, behind its transformer
            sampler = f"output_blocks.{number - 1}.{1 + attention}.conv"
            yield f"up_blocks.{up}.upsamplers.0.conv", sampler


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
    # A parameter of the network itself in OpenCLIP, hence no `.weight`.
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
        with suppress(KeyError):  # a tensor of the file that is no module of the U-Net
            if architecture is not None:
                module = diffusers_module(module, architecture=architecture)
            yield f"{DENOISER}.{module}", WeightPlace(tensor=full)


def _architecture(names: Iterable[str]) -> Mapping[str, Any]:
    """Return the part of diffusers' configuration that decides the block numbers, from a file's names."""
    resnets, attended = [0], [False]
    blocks = sorted(
        (int(match[1]), match.lastindex or 0) for name in names if (match := _DOWN.fullmatch(name))
    )
    for _, kind in blocks:
        # The group of `_DOWN` that matched: a resnet, a transformer, or the downsampler that ends a level.
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
        if not open_clip:
            if name.endswith(WEIGHT):
                module = name.removeprefix(TEXT_MODEL).removesuffix(WEIGHT)
                yield f"{text.component}.{module}", WeightPlace(tensor=full)
            continue
        for module, rows in _open_clip_modules(name, height=info.shape[0]):
            yield f"{text.component}.{module}", WeightPlace(tensor=full, rows=rows)


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
