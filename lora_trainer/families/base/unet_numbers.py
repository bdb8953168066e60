"""The numbers of a U-Net, from its configuration as diffusers writes it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError

UNET_CLASS = "UNet2DConditionModel"


# diffusers leaves keys out of old configurations; these are its own defaults.
DEFAULTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("unet_defaults.json").read_text(encoding="utf-8")
)


# The keys that fix the network. Any other value than the default in another key of `DEFAULTS` changes the network
# in a way that is not described here.
NUMBERS = (
    *("in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels"),
    *(
        "layers_per_block",
        "transformer_layers_per_block",
        "cross_attention_dim",
        "attention_head_dim",
    ),
    *("norm_num_groups", "use_linear_projection", "time_embedding_dim"),
    *("conv_in_kernel", "conv_out_kernel"),
    *("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
)


BLOCK_TYPES = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")


# diffusers calls the number of heads attention_head_dim.
PER_LEVEL = ("layers_per_block", "transformer_layers_per_block", "attention_head_dim")


# Numbers that `text_time` embeds beside the pooled text: original size, crop corner, target size.
TIME_IDS = 6


def unet_numbers(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `NUMBERS` in a configuration, those of each level as lists.

    Bases of equal values have equal networks. Raises InputError for a network of another kind.
    """
    config = {**DEFAULTS, **architecture}
    wrong = [
        f"{key}={config[key]!r}"
        for key, value in DEFAULTS.items()
        if key not in NUMBERS and config[key] != value
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
        key: list(config[key]) if isinstance(config[key], tuple) else config[key] for key in NUMBERS
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
