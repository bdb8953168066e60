"""Names in the releases' own code stand for the rows that diffusers' own conversions give the layers.

The oracle is diffusers: a checkpoint whose weights are numbered rows is converted by it, and the rows
that each layer gets are those that an adapter file in the checkpoint's names is read to change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
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
    weights, start = dict[str, Tensor](), 0
    for name, shape in layouts.network(family).items():
        if len(shape) > 1 and name.endswith(".weight") and ORIGINAL.match(name):
            rows = torch.arange(start, start + shape[0], dtype=torch.float64)
            weights[name.removesuffix(".weight")] = rows[:, None]
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
