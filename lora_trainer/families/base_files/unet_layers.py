"""A U-Net's numbers and the names of its layers, from its configuration as diffusers writes it. Torch-free.

The checkpoints' names come from the original code (Rombach et al. 2022, arXiv 2112.10752): blocks have
consecutive numbers, a resnet's layers have their index in a sequence. SDXL's LoRA files use these names too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import InputError

UNET_CLASS = "UNet2DConditionModel"
# diffusers leaves keys out of old configurations; these are its own defaults.
DEFAULTS: Mapping[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 1280,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
    "use_linear_projection": False,
    "time_embedding_dim": None,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "addition_embed_type": None,
}
# Any other value in these keys changes the network in a way that `UNet` does not describe.
REQUIRED: Mapping[str, Any] = {
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "only_cross_attention": False,
    "dual_cross_attention": False,
    "num_attention_heads": None,
    "encoder_hid_dim_type": None,
    "class_embed_type": None,
    "num_class_embeds": None,
    "resnet_time_scale_shift": "default",
    "time_embedding_type": "positional",
    "time_cond_proj_dim": None,
    "reverse_transformer_layers_per_block": None,
    "attention_type": "default",
    "cross_attention_norm": None,
}
WITH_ATTENTION = {
    "CrossAttnDownBlock2D": True,
    "DownBlock2D": False,
    "CrossAttnUpBlock2D": True,
    "UpBlock2D": False,
}
TIME_IDS = 6
"""Numbers that `text_time` embeds beside the pooled text: original size, crop corner, target size."""


@dataclass(frozen=True, kw_only=True)
class UNet:
    """The numbers that fix the network; tuples have one entry per resolution level."""

    in_channels: int
    out_channels: int
    channels: tuple[int, ...]
    resnets: tuple[int, ...]
    transformers: tuple[int, ...]
    heads: tuple[int, ...]
    down_attention: tuple[bool, ...]
    up_attention: tuple[bool, ...]
    text_width: int
    norm_groups: int
    linear_projection: bool
    time_width: int
    added_width: int
    """Width of the vector embedded beside the timestep (0: none); `pooled_width` of it is pooled text."""
    pooled_width: int
    kernel_in: int
    kernel_out: int


def read_unet(architecture: Mapping[str, Any]) -> UNet:
    """Return the numbers that fix the network; raises InputError for a network of another kind."""
    config = {**DEFAULTS, **architecture}
    wrong = [
        f"{key}={config[key]!r}"
        for key in REQUIRED
        if key in config and config[key] != REQUIRED[key]
    ]
    blocks = dict.fromkeys([*config["down_block_types"], *config["up_block_types"]])
    wrong += [f"block type {name}" for name in blocks if name not in WITH_ATTENTION]
    if config["addition_embed_type"] not in (None, "text_time"):
        wrong.append(f"addition_embed_type={config['addition_embed_type']!r}")
    if wrong:
        raise InputError(
            f"the U-Net has {', '.join(wrong)}, which is not supported",
            fix="use a base model of a supported family",
        )
    channels = tuple(int(width) for width in config["block_out_channels"])
    levels = len(channels)
    added_width, pooled_width = _added(config)
    return UNet(
        in_channels=int(config["in_channels"]),
        out_channels=int(config["out_channels"]),
        channels=channels,
        resnets=_per_level(config["layers_per_block"], levels),
        transformers=_per_level(config["transformer_layers_per_block"], levels),
        # diffusers calls the number of heads attention_head_dim
        heads=_per_level(config["attention_head_dim"], levels),
        down_attention=tuple(WITH_ATTENTION[name] for name in config["down_block_types"]),
        up_attention=tuple(WITH_ATTENTION[name] for name in config["up_block_types"]),
        # diffusers allows a width per block; a text has one, so all are equal.
        text_width=_per_level(config["cross_attention_dim"], levels)[0],
        norm_groups=int(config["norm_num_groups"]),
        linear_projection=bool(config["use_linear_projection"]),
        # UNet2DConditionModel._set_time_proj: four times the first level's channels.
        time_width=int(config["time_embedding_dim"] or 4 * channels[0]),
        added_width=added_width,
        pooled_width=pooled_width,
        kernel_in=int(config["conv_in_kernel"]),
        kernel_out=int(config["conv_out_kernel"]),
    )


def _added(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the width of `text_time`'s whole input and of the pooled text in it; (0, 0) without it."""
    if config["addition_embed_type"] is None:
        return 0, 0
    width = int(config["projection_class_embeddings_input_dim"])
    return width, width - TIME_IDS * int(config["addition_time_embed_dim"])


def _per_level(value: Any, levels: int) -> tuple[int, ...]:
    """Expand diffusers' spelling (one number for all levels, or a list) to one number per level."""
    return tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),) * levels


# ---- names in checkpoints

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
