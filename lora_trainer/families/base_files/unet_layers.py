"""A U-Net's numbers and the names of its layers, from its configuration as diffusers writes it. Torch-free.

The checkpoints' names come from the original code (Rombach et al. 2022, arXiv 2112.10752): blocks have
consecutive numbers, a resnet's layers have their index in a sequence. SDXL's LoRA files use these names too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from lora_trainer.common.errors import InputError

UNET_CLASS = "UNet2DConditionModel"
# diffusers leaves keys out of old configurations; these are its own defaults.
DEFAULTS: Mapping[str, Any] = {  # the keys that fix the network
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
    "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
}
# Any other value in these keys changes the network in a way that is not described here.
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
BLOCK_TYPES = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
# diffusers calls the number of heads attention_head_dim.
PER_LEVEL = ("layers_per_block", "transformer_layers_per_block", "attention_head_dim")
TIME_IDS = 6
"""Numbers that `text_time` embeds beside the pooled text: original size, crop corner, target size."""


def unet_numbers(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `DEFAULTS` in a configuration, those of each level as lists.

    Bases of equal values have equal networks. Raises InputError for a network of another kind.
    """
    config = {**DEFAULTS, **architecture}
    wrong = [
        f"{key}={config[key]!r}"
        for key in REQUIRED
        if key in config and config[key] != REQUIRED[key]
    ]
    blocks = dict.fromkeys([*config["down_block_types"], *config["up_block_types"]])
    wrong += [f"block type {name}" for name in blocks if name not in BLOCK_TYPES]
    if config["addition_embed_type"] not in (None, "text_time"):
        wrong.append(f"addition_embed_type={config['addition_embed_type']!r}")
    if wrong:
        raise InputError(
            f"the U-Net has {', '.join(wrong)}, which is not supported",
            fix="use a base model of a supported family",
        )
    levels = len(config["block_out_channels"])
    numbers = {
        key: list(config[key]) if isinstance(config[key], tuple) else config[key]
        for key in DEFAULTS
    }
    for key in PER_LEVEL:
        if not isinstance(numbers[key], list):
            numbers[key] = [numbers[key]] * levels
    # diffusers allows a width per block; a text has one, so all are equal.
    if isinstance(numbers["cross_attention_dim"], list):
        numbers["cross_attention_dim"] = numbers["cross_attention_dim"][0]
    # UNet2DConditionModel._set_time_proj: four times the first level's channels.
    numbers["time_embedding_dim"] = numbers["time_embedding_dim"] or 4 * int(
        numbers["block_out_channels"][0]
    )
    if numbers["addition_embed_type"] is None:  # these keys then say nothing
        numbers |= dict.fromkeys(
            ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
        )
    return numbers


def pooled_width(numbers: Mapping[str, Any]) -> int:
    """Return the width of the pooled text that `text_time` embeds, 0 without it."""
    if numbers["addition_embed_type"] is None:
        return 0
    width = int(numbers["projection_class_embeddings_input_dim"])
    return width - TIME_IDS * int(numbers["addition_time_embed_dim"])


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
    return _renamed(module, dict(_blocks(unet_numbers(architecture))))


def _renamed(module: str, blocks: Mapping[str, str]) -> str:
    """Rename by the tables of blocks, of layers outside blocks and of layers in resnets."""
    if module in _ENDS:
        return _ENDS[module]
    parts = module.split(".")
    # The longest matching block wins: a downsampler is a whole block.
    for count in range(len(parts), 0, -1):
        block, inner = ".".join(parts[:count]), ".".join(parts[count:])
        if block in blocks:
            renamed = _RESNET[inner] if inner and "resnets" in block else inner
            return f"{blocks[block]}.{renamed}" if renamed else blocks[block]
    raise KeyError(module)


def checkpoint_names(
    modules: Iterable[str], *, architecture: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return checkpoint name -> (diffusers' module,), without modules that no release has."""
    blocks = dict(_blocks(unet_numbers(architecture)))
    modules_by_name: dict[str, tuple[str, ...]] = {}
    for module in modules:
        with suppress(KeyError):
            modules_by_name[_renamed(module, blocks)] = (module,)
    return modules_by_name


def _blocks(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (diffusers' name, checkpoint's name) of every resnet, transformer and sampler."""
    last = len(numbers["layers_per_block"]) - 1
    number = 1  # 0 is conv_in
    for level, (resnets, kind) in enumerate(
        zip(numbers["layers_per_block"], numbers["down_block_types"], strict=True)
    ):
        for index in range(resnets):
            yield f"down_blocks.{level}.resnets.{index}", f"input_blocks.{number}.0"
            if kind.startswith("CrossAttn"):
                yield f"down_blocks.{level}.attentions.{index}", f"input_blocks.{number}.1"
            number += 1
        if level < last:
            yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    for middle, name in enumerate(_MIDDLE):
        yield f"mid_block.{name}", f"middle_block.{middle}"
    number = 0
    for up, (resnets, kind) in enumerate(
        zip(reversed(numbers["layers_per_block"]), numbers["up_block_types"], strict=True)
    ):
        attention = kind.startswith("CrossAttn")
        for index in range(resnets + 1):  # one more than on the way down
            yield f"up_blocks.{up}.resnets.{index}", f"output_blocks.{number}.0"
            if attention:
                yield f"up_blocks.{up}.attentions.{index}", f"output_blocks.{number}.1"
            number += 1
        if up < last:  # in the same block as the level's last resnet, behind its transformer
            sampler = f"output_blocks.{number - 1}.{1 + attention}.conv"
            yield f"up_blocks.{up}.upsamplers.0.conv", sampler
