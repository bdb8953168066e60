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
from lora_trainer.families.base_files.unet_layers import diffusers_module, ldm_module
from tests.fakes.stable_diffusion import MINI_UNET

ODD_UNET = {
    "block_out_channels": [8, 16, 16, 24, 24],
    "layers_per_block": 3,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"]
    + ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"]
    + ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
UNETS: Mapping[str, Mapping[str, Any]] = {
    **{
        name: next(iter(families.family(name).releases.values())).architecture
        for name in ("sd15", "sd2", "sdxl")
    },
    "mini": MINI_UNET,
    "odd": ODD_UNET,
}
EACH = pytest.mark.parametrize("config", UNETS.values(), ids=UNETS)


def layers(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules of a U-Net that have weights."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(dict(config))
    return [name for name, module in unet.named_modules() if [*module.parameters(recurse=False)]]


@EACH
def test_names_are_those_that_diffusers_own_converter_reads(config: Mapping[str, Any]) -> None:
    """Every parameter is written under our name, with its own name in it; conversion gives it back."""
    with torch.device("meta"):
        names = [
            name for name, _ in UNet2DConditionModel.from_config(dict(config)).named_parameters()
        ]
    markers = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    checkpoint = {}
    for name, marker in markers.items():
        module, _, parameter = name.rpartition(".")
        renamed = f"{ldm_module(module, architecture=config)}.{parameter}"
        checkpoint[f"model.diffusion_model.{renamed}"] = marker
    assert len(checkpoint) == len(markers), "two modules share a name"
    full = {"layers_per_block": 2, "num_class_embeds": None, **config}
    assert convert_ldm_unet_checkpoint(checkpoint, full) == markers


@EACH
def test_every_module_and_no_other_comes_back(config: Mapping[str, Any]) -> None:
    names = layers(config)
    renamed = [ldm_module(name, architecture=config) for name in names]
    assert len(set(renamed)) == len(names)
    assert [diffusers_module(name, architecture=config) for name in renamed] == names
    for strange in ("", "down_blocks.7.resnets.0.conv1", "down_blocks.0.resnets.0.conv9", "vae"):
        with pytest.raises(KeyError):
            ldm_module(strange, architecture=config)
    for strange in ("", "input_blocks.99.0", "input_blocks.1.0.in_layers.7", "down_blocks.0"):
        with pytest.raises(KeyError):
            diffusers_module(strange, architecture=config)


@st.composite
def architectures(draw: st.DrawFn) -> dict[str, Any]:
    levels = draw(st.integers(1, 5))
    attention = st.lists(st.booleans(), min_size=levels, max_size=levels)
    down, up = draw(attention), draw(attention)
    count = st.integers(1, 4)
    each = st.lists(count, min_size=levels, max_size=levels)
    return {
        "block_out_channels": [4 * 2 ** draw(st.integers(0, 2)) for _ in range(levels)],
        "layers_per_block": draw(count | each),
        "transformer_layers_per_block": draw(count | each),
        "down_block_types": ["CrossAttnDownBlock2D" if found else "DownBlock2D" for found in down],
        "up_block_types": ["CrossAttnUpBlock2D" if found else "UpBlock2D" for found in up],
        "use_linear_projection": draw(st.booleans()),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 2,
        "projection_class_embeddings_input_dim": 20,
        "cross_attention_dim": 4,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }


@settings(max_examples=20, deadline=None)
@given(architectures())
def test_names_of_any_unet_are_one_to_one(config: dict[str, Any]) -> None:
    names = layers(config)
    renamed = {name: ldm_module(name, architecture=config) for name in names}
    assert len(set(renamed.values())) == len(names)
    for name, theirs in renamed.items():
        assert diffusers_module(theirs, architecture=config) == name


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("conv_in", "input_blocks.0.0"),
        ("add_embedding.linear_2", "label_emb.0.2"),
        ("down_blocks.0.resnets.1.time_emb_proj", "input_blocks.2.0.emb_layers.1"),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("down_blocks.1.resnets.0.conv_shortcut", "input_blocks.4.0.skip_connection"),
        (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
            "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
        ),
        ("mid_block.attentions.0.proj_in", "middle_block.1.proj_in"),
        ("mid_block.resnets.1.conv2", "middle_block.2.out_layers.3"),
        ("up_blocks.0.upsamplers.0.conv", "output_blocks.2.2.conv"),
        ("up_blocks.2.resnets.2.conv1", "output_blocks.8.0.in_layers.2"),
        ("conv_out", "out.2"),
    ],
)
def test_names_that_files_of_sdxl_have(module: str, expected: str) -> None:
    assert ldm_module(module, architecture=UNETS["sdxl"]) == expected
