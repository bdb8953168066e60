"""Transformers in the layout of their releases, as ComfyUI and Civitai keep them: q, k and v are one matrix.

The inverse of diffusers' conversions, which read these files back. Layers are renamed by the family's own table; norms,
which adapters never name, by the rules here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers.loaders import single_file_utils
from pytest import MonkeyPatch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer import families
from tests.fakes.family_bases import base_of
from tests.fakes.tiny_base import tiny_table

_TESTS = {name: tiny_table(name)["tests"] for name in families.NAMES}
ORIGINAL = re.compile(
    r"(?:img_in|txt_in|time_in|vector_in|guidance_in|final_layer|x_embedder|t_embedder|y_embedder"
    r"|context_embedder|distilled_guidance_layer|(?:double|single)_stream_modulation\w*|layers|\w+_refiner"
    r"|double_blocks\.\d+\.(?:img|txt)_|single_blocks\.\d+\.(?:linear|modulation)|joint_blocks"
    + "".join(f"|{said['original']}" for said in _TESTS.values() if "original" in said)
    + ")"
)
"""Names of a release's own layers, of all names that stand for a layer in adapter files; `original` has a family's."""
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NORMS: Mapping[str, Mapping[str, str]] = {
    name: _TESTS[said.get("norms_like", name)]["norms"]
    for name, said in _TESTS.items()
    if {"norms", "norms_like"} & said.keys()
}
"""By family: names of norms in the original files, by those of diffusers."""


def original_names(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a family's diffusers transformer as its release has them."""
    ends = (".weight", ".bias")
    shapes = {
        key.removesuffix(".weight"): tuple(tensor.shape)
        for key, tensor in state.items()
        if key.endswith(".weight")
    }
    names = families.family(name).layer_names(shapes)
    renamed: dict[str, Tensor] = {}
    left, flat = dict(state), _TESTS[name].get("flat")
    for own, layers in names.layers.items():
        if not ORIGINAL.match(own):
            continue
        for end in ends:
            parts = [left.pop(f"{layer}{end}") for layer in layers if f"{layer}{end}" in left]
            if parts and layers[0] in names.swapped:
                parts = list(reversed(parts[0].chunk(2)))
            if parts:
                renamed[own + end] = torch.cat(parts)
    for key, tensor in left.items():
        for pattern, new in NORMS[name].items():
            key = re.sub(pattern, new, key)
        renamed[key] = tensor.flatten() if flat and re.search(flat, key) else tensor.clone()
    for component, start in families.family(name).text.inside.items():
        (file,) = (base_of(name) / component).glob("*.safetensors")
        renamed |= {f"{start}{key}": tensor for key, tensor in load_file(file).items()}
    return renamed


def split_at(patch: MonkeyPatch, *, inner: int) -> None:
    """Let diffusers' conversion of FLUX.1, which knows one width only, split tensors of width `inner`."""
    split = torch.split
    known = 3072

    def scaled(tensor: Tensor, sizes: object, dim: int = 0) -> tuple[Tensor, ...]:
        if isinstance(sizes, tuple):
            sizes = [size * inner // known for size in sizes]
        return tuple(split(tensor, sizes, dim=dim))  # type: ignore[arg-type]  # what the caller gave

    patch.setattr(single_file_utils.torch, "split", scaled)
