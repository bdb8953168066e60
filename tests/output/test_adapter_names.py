"""The spellings of modules and tensors in files of every trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_lora_to_diffusers

from lora_trainer.families import family
from lora_trainer.lora_file.names import file_names, parse_key

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
CLIP = "text_model.encoder.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lora_unet_a_b.lora_down.weight", ("lora_unet_a_b", "lora", "down")),
        ("lora_unet_a_b.lora_up.weight", ("lora_unet_a_b", "lora", "up")),
        ("lora_unet_a_b.lora_mid.weight", ("lora_unet_a_b", "lora", "mid")),
        ("lora_unet_a_b.alpha", ("lora_unet_a_b", None, "alpha")),
        ("lora_unet_a_b.dora_scale", ("lora_unet_a_b", "lora", "magnitude")),
        ("unet.a.to_q.lora_A.weight", ("unet.a.to_q", "lora", "down")),
        ("unet.a.to_q.lora_B.default.weight", ("unet.a.to_q", "lora", "up")),
        ("unet.a.lora_magnitude_vector", ("unet.a", "lora", "magnitude")),
        ("text_encoder.a.lora_magnitude_vector.weight", ("text_encoder.a", "lora", "magnitude")),
        ("unet.a.processor.to_q_lora.down.weight", ("unet.a.processor.to_q", "lora", "down")),
        ("unet.a.to_q.lora.up.weight", ("unet.a.to_q", "lora", "up")),
        ("text_encoder.a.lora_linear_layer.up.weight", ("text_encoder.a", "lora", "up")),
        ("lora_unet_a.hada_w2_b", ("lora_unet_a", "loha", "w2_b")),
        ("diffusion_model.a.lokr_w1", ("diffusion_model.a", "lokr", "w1")),
        ("lycoris_a.lokr_w2_a", ("lycoris_a", "lokr", "w2_a")),
        ("lora_unet_a.oft_blocks", ("lora_unet_a", "oft", "blocks")),
        ("lora_unet_a.hada_t1", ("lora_unet_a", "loha", "t1")),
        ("emb_params", None),
        ("unet.a.weight", None),
        ("unet.a.lora_B.bias", ("unet.a", "lora", "up_bias")),
    ],
)
def test_the_end_of_a_key_is_the_role_of_its_tensor(key: str, expected: Any) -> None:
    assert parse_key(key) == expected


@pytest.mark.parametrize(
    "spelling",
    [
        f"unet.{ATTENTION}",
        f"base_model.model.{ATTENTION}",
        ATTENTION,
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_out",
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0",
        "lycoris_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0",
        "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_out_0",
        "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_out.0",
    ],
)
def test_spellings_of_a_denoiser_module(spelling: str) -> None:
    modules = {"denoiser": [ATTENTION, "up_blocks.0.resnets.2.conv1"]}
    assert file_names(family("sd15"), modules)[spelling] == f"denoiser.{ATTENTION}"


@pytest.mark.parametrize("module", [CLIP, CLIP.removeprefix("text_model.")])
@pytest.mark.parametrize(
    "spelling",
    [
        "lora_te_text_model_encoder_layers_3_self_attn_q_proj",
        "lora_te1_text_model_encoder_layers_3_self_attn_q_proj",
        "lora_te1_encoder_layers_3_self_attn_q_proj",
        "text_encoder.text_model.encoder.layers.3.self_attn.q_proj",
        "text_encoder.encoder.layers.3.self_attn.q_proj",
        "text_encoder.text_model.encoder.layers.3.self_attn.to_q",
    ],
)
def test_spellings_of_a_text_module(spelling: str, module: str) -> None:
    """Whatever transformers calls it today, files have all of these."""
    found = file_names(family("sd15"), {"text_encoder": [module]})
    assert found[spelling] == f"text_encoder.{module}"


def test_two_text_encoders_are_kept_apart() -> None:
    both = {"denoiser": [], "text_encoder": [CLIP], "text_encoder_2": [CLIP]}
    found = file_names(family("sdxl"), both)
    flat = CLIP.replace(".", "_")
    assert found[f"lora_te1_{flat}"] == f"text_encoder.{CLIP}"
    assert found[f"lora_te2_{flat}"] == f"text_encoder_2.{CLIP}"
    assert found[f"text_encoder_2.{CLIP}"] == f"text_encoder_2.{CLIP}"


def small_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
    )


def test_every_module_has_at_least_one_spelling_of_its_own() -> None:
    with torch.device("meta"):
        unet = small_unet()
    names = family("sd15").lora_targets(unet, "all")
    found = file_names(family("sd15"), {"denoiser": names})
    for name in names:
        flat = "lora_unet_" + name.replace(".", "_")
        assert found[flat] == found[f"unet.{name}"] == f"denoiser.{name}"


# ---- names of the releases' own code


@pytest.mark.parametrize(
    ("name", "module", "original"),
    [
        ("sd15", "down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("sd15", "up_blocks.0.upsamplers.0.conv", "output_blocks.2.1.conv"),
        ("sd2", "up_blocks.1.upsamplers.0.conv", "output_blocks.5.2.conv"),
        ("sdxl", "down_blocks.1.attentions.0.proj_in", "input_blocks.4.1.proj_in"),
        ("sdxl", "down_blocks.2.resnets.1.time_emb_proj", "input_blocks.8.0.emb_layers.1"),
        ("sdxl", "up_blocks.0.upsamplers.0.conv", "output_blocks.2.2.conv"),
    ],
)
@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_", "diffusion_model."])
def test_modules_of_a_unet_are_found_by_the_names_of_checkpoints(
    name: str, module: str, original: str, prefix: str
) -> None:
    """The numbers are those of the published bases, whichever modules have an adapter."""
    spelling = prefix + (original if prefix.endswith(".") else original.replace(".", "_"))
    assert file_names(family(name), {"denoiser": [module]})[spelling] == f"denoiser.{module}"


def test_modules_that_no_release_has_keep_their_own_names() -> None:
    module = "down_blocks.7.resnets.0.conv1"
    assert f"unet.{module}" not in file_names(family("sdxl"), {"denoiser": []})
    assert f"unet.{module}" in file_names(family("sdxl"), {"denoiser": [module]})
    assert family("sdxl").layer_names({module: ()}).layers == {}


def test_diffusers_understands_the_attention_names() -> None:
    """Its own converter, given sgm's block numbers back as its own, finds the layer."""
    key = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    converted, _ = _convert_non_diffusers_lora_to_diffusers(
        {f"{key}.lora_down.weight": torch.ones(1), f"{key}.lora_up.weight": torch.ones(1)}
    )
    (spelling,) = {parsed[0] for name in converted if (parsed := parse_key(name))}
    module = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    assert file_names(family("sd15"), {"denoiser": [module]})[spelling] == f"denoiser.{module}"


def test_names_cost_no_torch() -> None:
    code = "import sys, lora_trainer.lora_file.names; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
