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
from diffusers.loaders import single_file_utils
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.families.base_files.unet_file import ldm_module
from lora_trainer.families.facts import DENOISER
from lora_trainer.families.releases import released_layers
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora_file.base_layers import LayerNames, released_names
from lora_trainer.lora_file.read_tensors import read_tensors
from tests.checkpoint_files import layouts
from tests.fakes.original_names import ORIGINAL

CONVERTED = {
    "flux": "convert_flux_transformer_checkpoint_to_diffusers",
    "chroma": "convert_chroma_transformer_checkpoint_to_diffusers",
    "sd3": "convert_sd3_transformer_checkpoint_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers",
    "zimage": "convert_z_image_transformer_checkpoint_to_diffusers",
    "lumina2": "convert_lumina2_to_diffusers",
}


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


@pytest.mark.parametrize("name", CONVERTED)
def test_rows_are_those_that_diffusers_converts(name: str, tmp_path: Path) -> None:
    weights = numbered(name)
    checkpoint = Checkpoint({f"{key}.weight": rows for key, rows in weights.items()})
    convert = getattr(single_file_utils, CONVERTED[name])
    converted = convert(checkpoint)
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


@pytest.mark.parametrize("name", list(families.MODULES))
def test_the_table_has_the_layers_of_the_networks(name: str) -> None:
    """`scripts/write_layer_tables.py` was run after the last change of diffusers or of the releases."""
    family = families.family(name)
    tables = released_layers(name)
    for release in family.published:
        assert denoiser_layers(family, release.architecture) in tables


@pytest.mark.parametrize("name", list(families.MODULES))
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
