"""Names of U-Net modules in checkpoints: one to one, as diffusers' own converter has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer import families
from lora_trainer.families.base_files.unet_file import ldm_module


def check_names(config: Mapping[str, Any]) -> None:
    """Write every parameter under our name, with its own name in it: conversion gives it back."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(dict(config))
    markers = {
        name: torch.tensor(float(number))
        for number, (name, _) in enumerate(unet.named_parameters())
    }
    checkpoint = {}
    for name, marker in markers.items():
        module, _, parameter = name.rpartition(".")
        renamed = f"{ldm_module(module, architecture=config)}.{parameter}"
        checkpoint[f"model.diffusion_model.{renamed}"] = marker
    assert len(checkpoint) == len(markers), "two modules share a name"
    full = {"layers_per_block": 2, "num_class_embeds": None, **config}
    assert convert_ldm_unet_checkpoint(checkpoint, full) == markers


def test_names_of_a_release_are_those_that_diffusers_own_converter_reads() -> None:
    release = families.family("sdxl").published[0].architecture
    check_names(release)
    for strange in ("", "down_blocks.7.resnets.0.conv1", "down_blocks.0.resnets.0.conv9", "vae"):
        with pytest.raises(KeyError):
            ldm_module(strange, architecture=release)


@st.composite
def architectures(draw: st.DrawFn) -> dict[str, Any]:
    levels = draw(st.integers(1, 5))
    attention = st.lists(st.booleans(), min_size=levels, max_size=levels)
    down, up = draw(attention), draw(attention)
    counts = st.lists(st.integers(1, 4), min_size=levels, max_size=levels)
    return {
        "block_out_channels": [4 * 2 ** draw(st.integers(0, 2)) for _ in range(levels)],
        "layers_per_block": draw(st.integers(1, 4)),
        "transformer_layers_per_block": draw(st.integers(1, 4) | counts),
        "down_block_types": ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in down],
        "up_block_types": ["CrossAttnUpBlock2D" if has else "UpBlock2D" for has in up],
        "use_linear_projection": draw(st.booleans()),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 2,
        "projection_class_embeddings_input_dim": 20,
        "cross_attention_dim": 4,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }


@settings(max_examples=12, deadline=None)
@given(architectures())
def test_names_of_any_unet_are_those_that_the_converter_reads(config: dict[str, Any]) -> None:
    check_names(config)
