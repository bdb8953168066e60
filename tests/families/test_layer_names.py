"""Names in the releases' own code stand for the rows that diffusers' own conversions give the layers.

The oracle is diffusers: a checkpoint whose weights are numbered rows is converted by it, and the rows
that each layer gets are those that an adapter file in the checkpoint's names is read to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.config.declare import TARGETS
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.releases import released_layers
from lora_trainer.families.files.recognise import adapter_family
from lora_trainer.families.files.unet_file import ldm_module
from lora_trainer.lora_file.base_layers import LayerNames, released_names
from lora_trainer.lora_file.read_tensors import read_tensors
from tests.checkpoint_files import layouts
from tests.fakes.original_names import NORMS, ORIGINAL


class Checkpoint(dict[str, Tensor]):
    """A checkpoint that has a tensor of one number for every name that is asked for."""

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(key, torch.zeros(3 * 3072 + 4 * 3072))


def numbered(family: str) -> dict[str, Tensor]:
    """Return weights [out, 1] of a whole checkpoint, each row with a number that no other has."""
    layers = released_layers(family)[0]
    in_adapters = {*layers, *families.family(family).layer_names(layers).layers}
    weights, start = dict[str, Tensor](), 0
    for key, shape in layouts.network(family).items():
        name = key.removesuffix(".weight")
        if len(shape) > 1 and name in in_adapters and ORIGINAL.match(name):
            rows = torch.arange(start, start + shape[0], dtype=torch.float64)
            weights[name] = rows[:, None]
            start += shape[0]
    return weights


# diffusers reads no single file of some families, and Qwen-Image's has no joined rows.
CONVERTED = [
    name
    for name in NORMS
    if families.family(name).traits.class_name in SINGLE_FILE_LOADABLE_CLASSES and name != "qwen"
]


@pytest.mark.parametrize("name", CONVERTED)
def test_rows_are_those_that_diffusers_converts(name: str, tmp_path: Path) -> None:
    weights = numbered(name)
    checkpoint = Checkpoint({f"{key}.weight": rows for key, rows in weights.items()})
    kind = SINGLE_FILE_LOADABLE_CLASSES[families.family(name).traits.class_name]
    converted = kind["checkpoint_mapping_fn"](checkpoint)
    file = tmp_path / "a.safetensors"
    save_file({f"diffusion_model.{key}.diff": rows for key, rows in weights.items()}, file)
    read = read_tensors(file, names=released_names(name, 0))
    checked = 0
    for key, module in read.items():
        layer = key.removeprefix(f"{DENOISER}.")
        wanted = converted[f"{layer}.weight"]
        if wanted.dim() == 2:
            assert torch.equal(module.tensors["difference"], wanted), key
            checked += 1
    assert checked > len(read) * 0.9


@pytest.mark.parametrize("name", list(families.NAMES))
def test_no_name_stands_for_two_layers(name: str) -> None:
    family = families.family(name)
    for table in released_layers(name):
        names = LayerNames(family, {DENOISER: table})
        for layer in table:
            for spelling in (f"diffusion_model.{layer}", f"lora_unet_{layer.replace('.', '_')}"):
                keys = [each.key for each in names.find(spelling)]
                assert keys == [f"{DENOISER}.{layer}"], spelling


# ---- names of U-Nets in checkpoints: one to one, as diffusers' own converter has them


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


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl"])
def test_names_of_a_release_are_those_that_diffusers_own_converter_reads(name: str) -> None:
    release = families.family(name).published[0].architecture
    check_names(release)
    for strange in ("", "down_blocks.7.resnets.0.conv1", "down_blocks.0.resnets.0.conv9", "vae"):
        with pytest.raises(KeyError):
            ldm_module(strange, architecture=release)


# ---- whose adapter a file is: every family in each of its formats, in the sizes of the releases


BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


@pytest.mark.parametrize("targets", list(TARGETS))
@pytest.mark.parametrize("name", families.NAMES)
def test_adapters_of_every_family_are_told_apart(name: str, targets: Any) -> None:
    """Chroma's blocks are FLUX.1's: without metadata its adapters cannot be told from theirs."""
    family = families.family(name)
    facts = next(iter(family.releases.values()))
    with torch.device("meta"):
        denoiser = family.empty_denoiser(facts.release.architecture)
    metadata = {"ss_base_model_version": family.adapter_names(facts).kohya}
    spec = {"modelspec.architecture": family.adapter_names(facts).modelspec}
    assert adapter_family({}, metadata=metadata) == name
    for format in family.formats.written:
        widths = {
            family.lora_key_name(format, DENOISER, module): denoiser.get_submodule(module).weight.shape[1]  # type: ignore[union-attr]  # a tensor
            for module in family.lora_targets(denoiser, targets)
        }  # fmt: skip
        assert adapter_family(widths, metadata=metadata) == name
        assert adapter_family(widths, metadata=spec) == name
        alone = adapter_family(widths, metadata={})
        assert alone == ("flux" if name == "chroma" else name)


@pytest.mark.parametrize(
    ("modules", "widths", "expected"),
    [
        # kohya's and ComfyUI's spellings of families that are written otherwise here
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", (1536,), "sd3"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (3072,), "flux"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (6144,), "flux2dev"),
        ("transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", (6144,), "flux2dev"),
        ("transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", (4096,), "flux2"),
        ("transformer.transformer_blocks.0.attn.add_q_proj", (6144,), "flux2dev"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", (4096,), "flux2"),
        ("diffusion_model.double_stream_modulation_img.lin", (3072,), "flux2"),
        ("diffusion_model.transformer_blocks.3.img_mlp.gate_up", (4096,), "qwen21"),
        ("diffusion_model.content_mode_blocks.image_cond.0.q_proj", (3072,), "flux3"),
        ("diffusion_model.single_blocks.3.mlp_in", (3072,), "flux3"),
        ("transformer.single_transformer_blocks.0.ff.linear_out", (9216,), "flux3"),
        ("transformer.txt_mode_blocks.4.attn.to_out.0", (3072,), "flux3"),
        ("transformer.transformer_blocks.20.attn.to_q", (4096,), "qwen21"),
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
    by_name = dict(zip(modules.split(), widths, strict=True))
    assert adapter_family(by_name, metadata={}) == expected


@pytest.mark.parametrize(
    ("module", "size", "component"),
    [
        ("diffusion_model.layers.1.mlp.up_proj", (12288, 4096), "denoiser"),
        ("transformer.layers.1.mlp.up_proj", (0, 4096), "denoiser"),
        ("lora_unet_layers_1_mlp_up_proj", None, "denoiser"),
        ("model.layers.1.mlp.up_proj", (9216, 3072), "text_encoder"),
        (
            "text_encoders.ministral3_3b.transformer.model.layers.1.mlp.up_proj",
            None,
            "text_encoder",
        ),
    ],
)
def test_of_a_name_that_denoiser_and_text_encoder_have_the_prefix_or_the_size_tells(
    module: str, size: tuple[int, int] | None, component: str
) -> None:
    """A layer of the transformer was taken for one of its language model, and written back under that name."""
    (found,) = released_names("ernie", 0).find(module, size=size)
    assert found.key == f"{component}.layers.1.mlp.up_proj"


def test_metadata_says_whose_joint_blocks_they_are_and_tensors_that_tell_weigh_more() -> None:
    for block, width, stated, family in (
        (0, 6144, "flux2", "flux2dev"),  # ai-toolkit's name of dev
        (0, 4096, "flux2_klein_9b", "flux2"),
        (0, 3072, "chroma", "chroma"),
        (19, 3072, "chroma", "chroma"),
    ):
        widths = {f"transformer_blocks.{block}.attn.to_q": width}
        assert adapter_family(widths, metadata={"ss_base_model_version": stated}) == family
    assert adapter_family({f"unet.{BLOCK}.attn2.to_k": 0}, metadata={}) == "unknown"
    widths = {f"unet.{BLOCK}.attn2.to_k": 768}
    assert adapter_family(widths, metadata={"ss_base_model_version": "sdxl_base_v1-0"}) == "sd15"
