"""Names of the modules of a U-Net: diffusers' on one side, those of single-file checkpoints on the other.

The checkpoints' names come from the original code (Rombach et al. 2022, arXiv 2112.10752): blocks have
consecutive numbers, a resnet's layers have their index in a sequence. SDXL's LoRA files use these names
too. Input is the configuration as diffusers writes it; torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lora_trainer.families.unet_costs import read_unet
from lora_trainer.families.unet_walk import UNet

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
    return _ldm_name(module, dict(_blocks(read_unet(architecture))))


def _ldm_name(module: str, blocks: Mapping[str, str]) -> str:
    if module in _ENDS:
        return _ENDS[module]
    block, inner = _split(module, blocks)
    return _joined(blocks[block], _RESNET[inner] if inner and "resnets" in block else inner)


def checkpoint_names(
    modules: Iterable[str], *, architecture: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return diffusers' module by the checkpoint's name; modules that no release has are left out."""
    blocks = dict(_blocks(read_unet(architecture)))
    found: dict[str, tuple[str, ...]] = {}
    for module in modules:
        try:
            found[_ldm_name(module, blocks)] = (module,)
        except KeyError:
            continue
    return found


def diffusers_module(ldm: str, *, architecture: Mapping[str, Any]) -> str:
    """Return diffusers' name of a checkpoint's module: the inverse of `ldm_module`; raises KeyError likewise."""
    ends = {theirs: ours for ours, theirs in _ENDS.items()}
    if ldm in ends:
        return ends[ldm]
    blocks = {theirs: ours for ours, theirs in _blocks(read_unet(architecture))}
    block, inner = _split(ldm, blocks)
    layers = {theirs: ours for ours, theirs in _RESNET.items()}
    is_resnet = inner and "resnets" in blocks[block]
    return _joined(blocks[block], layers[inner] if is_resnet else inner)


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


def _split(module: str, blocks: Mapping[str, str]) -> tuple[str, str]:
    """Split a module into (block, name inside the block).

    The longest matching block wins: `input_blocks.3.0.op` is a whole block (a downsampler).
    """
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if (block := ".".join(parts[:count])) in blocks:
            return block, ".".join(parts[count:])
    raise KeyError(module)


def _joined(block: str, inner: str) -> str:
    return f"{block}.{inner}" if inner else block
