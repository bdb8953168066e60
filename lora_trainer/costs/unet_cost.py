"""Costs of a `UNet2DConditionModel`, from its configuration alone.

Parameters by kind, adapter parameters, bytes and FLOPs of one sample: the planner's source for the
families built on this network. Input is the configuration as diffusers writes it, a plain mapping;
nothing here needs torch or weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.costs.liveness import cost_of
from lora_trainer.costs.sample_cost import (
    TARGET_GROUPS,
    Group,
    Layer,
    SampleCost,
    Tape,
    Targets,
    Workload,
)
from lora_trainer.costs.unet_network import FeatureMapShape, UNet, walk

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
# Any other value in these keys changes the network in a way the walk does not know.
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
CONDITIONING_BYTES = 4


def layers(architecture: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return every module that has weights, named as in diffusers, in the order they run."""
    tape = Tape(element_bytes=4)
    side = 2 ** len(read_unet(architecture).channels)
    walk(read_unet(architecture), tape, sample=FeatureMapShape(side, side), text_tokens=1)
    return tuple(tape.layers)


def parameters(architecture: Mapping[str, Any]) -> dict[Group, int]:
    """Return the number of parameters by group of layers; their sum is the model's."""
    counts: dict[Group, int] = {}
    for layer in layers(architecture):
        counts[layer.group] = counts.get(layer.group, 0) + layer.parameters
    return counts


def adapter_layers(architecture: Mapping[str, Any], *, targets: Targets) -> tuple[Layer, ...]:
    """Return the layers that get an adapter, in the order they run."""
    return tuple(layer for layer in layers(architecture) if layer.group in TARGET_GROUPS[targets])


def linear_shapes(architecture: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (fan_in, out) of the linear layers in blocks, in the order they run.

    The projections around the transformers are 1x1 convolutions in the oldest networks.
    """
    config = {**DEFAULTS, **architecture}
    convolutions = () if config["use_linear_projection"] else (".proj_in", ".proj_out")
    return {
        layer.name: (layer.fan_in, layer.out)
        for layer in adapter_layers(architecture, targets="all")
        if layer.group != "convolution" and not layer.name.endswith(convolutions)
    }


def adapter_parameters(architecture: Mapping[str, Any], *, rank: int, targets: Targets) -> int:
    """Return the number of parameters of an adapter of this rank."""
    adapted = adapter_layers(architecture, targets=targets)
    return sum(rank * (layer.fan_in + layer.out) for layer in adapted)


def sample_cost(
    architecture: Mapping[str, Any], workload: Workload, *, vae_factor: int, text_tokens: int
) -> SampleCost:
    """Return the cost of one sample with this network frozen and an fp32 adapter beside it.

    Raises InputError for a network the walk does not know.
    """
    written = json.dumps(dict(architecture), sort_keys=True)
    alone = replace(
        workload, micro_batch=1
    )  # a U-Net's cost per sample does not depend on the batch
    return _sample_cost(written, alone, vae_factor=vae_factor, text_tokens=text_tokens)


@lru_cache(maxsize=256)
def _sample_cost(
    architecture: str, workload: Workload, *, vae_factor: int, text_tokens: int
) -> SampleCost:
    unet = read_unet(json.loads(architecture))
    uncheckpointed = replace(workload, checkpointing="none")  # one tape serves all levels
    tape = _recorded(architecture, uncheckpointed, vae_factor=vae_factor, text_tokens=text_tokens)
    return cost_of(
        tape,
        checkpointing=workload.checkpointing,
        conditioning_bytes=(text_tokens * unet.text_width + unet.pooled_width) * CONDITIONING_BYTES,
    )


@lru_cache(maxsize=8)
def _recorded(architecture: str, workload: Workload, *, vae_factor: int, text_tokens: int) -> Tape:
    tape = Tape(
        element_bytes=workload.element_bytes,
        rank=workload.rank,
        targets=workload.targets,
        wide_adapter=workload.wide_adapter,
    )
    sample = FeatureMapShape(workload.height_px // vae_factor, workload.width_px // vae_factor)
    walk(read_unet(json.loads(architecture)), tape, sample=sample, text_tokens=text_tokens)
    return tape


def prompt_shapes(
    architecture: Mapping[str, Any], *, text_tokens: int
) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each conditioning tensor of one prompt, batch 1."""
    unet = read_unet(architecture)
    text = {"text": (1, text_tokens, unet.text_width)}
    return {**text, "pooled": (1, unet.pooled_width)} if unet.pooled_width else text


def read_unet(architecture: Mapping[str, Any]) -> UNet:
    """Return the numbers that fix the network; raises InputError for one the walk does not know."""
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
        text_width=_per_level(config["cross_attention_dim"], levels)[0],
        norm_groups=int(config["norm_num_groups"]),
        linear_projection=bool(config["use_linear_projection"]),
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
