"""Whose adapter a file is: every registered family in each of its formats, in the sizes of the releases."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.config.declare import TARGETS
from lora_trainer.families.facts import DENOISER, BaseFacts
from lora_trainer.families.recognise import adapter_family

Shapes = Mapping[str, tuple[int, ...]]
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


@functools.cache
def release(name: str) -> tuple[BaseFacts, nn.Module]:
    """Return the facts and the denoiser, without weights, of a family's default release."""
    family = families.family(name)
    known = family.releases.get(next(iter(family.releases)))
    assert known is not None
    with torch.device("meta"):
        return known, family.empty_denoiser(known.architecture)


def files(name: str, targets: Any) -> Iterator[Shapes]:
    """Yield the modules of an adapter in each format of the family: name -> [rank, in, ...]."""
    family, (_, denoiser) = families.family(name), release(name)
    modules: Mapping[str, Any] = dict(denoiser.named_modules())
    for format in family.formats.written:
        yield {
            family.lora_key_name(format, DENOISER, module): (16, *modules[module].weight.shape[1:])
            for module in family.lora_targets(denoiser, targets)
        }


@pytest.mark.parametrize("targets", list(TARGETS))
@pytest.mark.parametrize("name", families.MODULES)
def test_adapters_of_every_family_are_told_apart(name: str, targets: Any) -> None:
    """Chroma's blocks are FLUX.1's: without metadata its adapters cannot be told from theirs."""
    facts, _ = release(name)
    family = families.family(name)
    metadata = {"ss_base_model_version": family.adapter_names(facts).kohya}
    spec = {"modelspec.architecture": family.adapter_names(facts).modelspec}
    assert adapter_family({}, metadata=metadata) == name
    for shapes in files(name, targets):
        assert adapter_family(shapes, metadata=metadata) == name
        assert adapter_family(shapes, metadata=spec) == name
        alone = adapter_family(shapes, metadata={})
        assert alone == ("flux" if name == "chroma" else name)


@pytest.mark.parametrize(
    ("modules", "widths", "expected"),
    [
        # kohya's and ComfyUI's spellings of families that are written otherwise here
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", (1536,), "sd3"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (3072,), "flux"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (6144,), "flux2"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (4096,), "flux2"),
        ("diffusion_model.double_stream_modulation_img.lin", (3072,), "flux2"),
        ("diffusion_model.distilled_guidance_layer.layers.0.in_layer", (5120,), "chroma"),
        ("diffusion_model.layers.0.attention.qkv", (3840,), "zimage"),
        ("diffusion_model.layers.0.attention.qkv", (2304,), "lumina2"),
        ("lora_unet_transformer_blocks_3_img_mlp_net_2", (12288,), "qwen"),
        ("lora_unet_transformer_blocks_59_attn_to_q", (3072,), "qwen"),
        ("transformer.transformer_blocks.3.attn.to_q", (3072,), "flux"),
        ("lycoris_transformer_blocks_3_attn2_to_q", (1536,), "sd3"),
        # without metadata
        (f"unet.{BLOCK}.attn2.to_q", (64,), "unknown"),
        ("input_blocks.4.1.transformer_blocks.0.attn2.to_q", (64,), "unknown"),
        ("middle_block.1.transformer_blocks.0.attn2.to_q", (64,), "unknown"),
        ("mid_block.motion_modules.0.transformer_blocks.0.attn2.to_q", (64,), "unknown"),
        ("mid_block.temporal_transformer_blocks.0.attn2.to_q", (64,), "unknown"),
        ("transformer_in.transformer_blocks.0.attn2.to_q", (64,), "unknown"),
        # FLUX.2 klein 4B is as wide as FLUX.1, and its MLP is narrower
        ("double_blocks.0.img_attn.qkv double_blocks.0.img_mlp.2", (3072, 12288), "flux"),
        ("double_blocks.0.img_attn.qkv double_blocks.0.img_mlp.2", (3072, 9216), "flux2"),
        ("single_blocks.0.linear1 single_blocks.0.linear2", (3072, 15360), "flux"),
        ("single_blocks.0.linear1 single_blocks.0.linear2", (3072, 12288), "flux2"),
        # text encoders alone
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1", (1280,), "sdxl"),
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q", (4096,), "sd3"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", (768,), "unknown"),
        # a miniature base, and other programs' families
        (f"unet.{BLOCK}.attn2.to_k", (64,), "sd15"),
        ("transformer.transformer_blocks.7.attn1.to_q", (2048,), "unknown"),
        ("diffusion_model.blocks.0.self_attn.q", (5120,), "wan"),
    ],
)
def test_modules_that_tell(modules: str, widths: tuple[int, ...], expected: str) -> None:
    shapes = {name: (16, width) for name, width in zip(modules.split(), widths, strict=True)}
    assert adapter_family(shapes, metadata={}) == expected


@pytest.mark.parametrize(
    ("module", "width", "stated"),
    [
        ("transformer_blocks.0.attn.to_q", 6144, "flux2"),
        ("transformer_blocks.0.attn.to_q", 3072, "chroma"),
        ("transformer_blocks.19.attn.to_q", 3072, "chroma"),
    ],
)
def test_metadata_says_whose_joint_blocks_they_are(module: str, width: int, stated: str) -> None:
    metadata = {"ss_base_model_version": stated}
    assert adapter_family({module: (16, width)}, metadata=metadata) == stated


def test_tensors_that_tell_weigh_more_than_metadata() -> None:
    assert adapter_family({f"unet.{BLOCK}.attn2.to_k": ()}, metadata={}) == "unknown"
    shapes = {f"unet.{BLOCK}.attn2.to_k": (4, 768)}
    assert adapter_family(shapes, metadata={"ss_base_model_version": "sdxl_base_v1-0"}) == "sd15"
