"""Weights in ComfyUI's quantised layouts, by the layouts' formulas, and the values they stand for.

The formulas are those of comfy-kitchen 0.2.40 (Apache-2.0), which wrote tests/checkpoint_files/kitchen.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of four bits with two of exponent and one of mantissa."""
Quantised = tuple[dict[str, Tensor], dict[str, Any], Tensor]
"""Tensors by what follows "weight" in their names, what is stated of the layer, the values in float32."""


def fp8(weight: Tensor) -> Quantised:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(FP8)
    return {"": stored, "_scale": scale}, {"format": "float8_e4m3fn"}, stored.float() * scale


def fp8_rows(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1).clamp(min=1e-12) / 448
    stored = (weight / scale[:, None]).to(FP8)
    entry = {"format": "float8_e4m3fn_rowwise"}
    return {"": stored, "_scale": scale}, entry, stored.float() * scale[:, None]


def int8(weight: Tensor) -> Quantised:
    scale = weight.abs().max() / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"": stored, "_scale": scale}, {"format": "int8_tensorwise"}, stored.float() * scale


@cache
def turn(group: int) -> Tensor:
    """Return the matrix that turns a group: minus for each base-4 digit where row and column sum to 3."""
    places = 4 ** torch.arange(len(f"{group:b}") // 2)
    digits = torch.arange(group)[:, None] // places % 4
    negative = (digits[:, None] + digits[None] == 3).sum(-1) % 2
    return (1 - 2 * negative).float() / group**0.5


def convrot(weight: Tensor) -> Quantised:
    """Return rows turned in groups of columns, as many as a group may have."""
    group = max(n for n in (4, 16, 64, 256) if weight.shape[1] % n == 0)
    turned = torch.cat([part @ turn(group).T for part in weight.split(group, dim=1)], dim=1)
    scale = (turned.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    stored = (turned / scale).round().to(torch.int8)
    restored = torch.cat([p @ turn(group) for p in (stored * scale).split(group, dim=1)], dim=1)
    entry = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    return {"": stored, "_scale": scale}, entry, restored


def mxfp8(weight: Tensor) -> Quantised:
    blocks = weight.reshape(len(weight), -1, 32)
    most = blocks.abs().amax(-1)
    exponents = (torch.log2((most / 448).clamp(min=2**-127)).ceil() + 127).to(torch.uint8)
    scales = torch.exp2(exponents.float() - 127)
    stored = (blocks / scales[..., None]).to(FP8)
    values = (stored.float() * scales[..., None]).reshape(weight.shape)
    tensors = {"": stored.reshape(weight.shape), "_scale": blocked(exponents)}
    return tensors, {"format": "mxfp8"}, values


def nvfp4(weight: Tensor) -> Quantised:
    whole = weight.abs().max() / (448 * 6)
    blocks = weight.reshape(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    steps = whole * scales.float()[..., None]
    magnitudes = (blocks / steps.clamp(min=1e-30)).abs()
    codes = (magnitudes[..., None] - LEVELS).abs().argmin(-1)
    values = (LEVELS[codes] * steps * blocks.sign()).reshape(weight.shape)
    codes = (codes + 8 * (blocks < 0)).reshape(weight.shape)
    packed = (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8)
    return {"": packed, "_scale": blocked(scales), "_scale_2": whole}, {"format": "nvfp4"}, values


def blocked(scales: Tensor) -> Tensor:
    """Return a matrix of 1-byte scales in cuBLAS's order: tiles of 128 rows and 4 columns."""
    down, across = -(-len(scales) // 128), -(-scales.shape[1] // 4)
    row, column = torch.arange(len(scales))[:, None], torch.arange(scales.shape[1])
    tile = row // 128 * across + column // 4
    order = torch.zeros(down * across * 512, dtype=torch.uint8)
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    order[place] = scales.view(torch.uint8)
    return order.view(scales.dtype).reshape(down * 128, across * 4)


LAYOUTS: Mapping[str, tuple[Callable[[Tensor], Quantised], int]] = {
    "fp8": (fp8, 1),
    "fp8_rows": (fp8_rows, 1),
    "int8": (int8, 1),
    "convrot": (convrot, 4),
    "mxfp8": (mxfp8, 32),
    "nvfp4": (nvfp4, 16),
}
"""Layout -> its function, and the number that divides the columns of its weights."""


def quantised(
    tensors: Mapping[str, Tensor], *layouts: str, listed: bool = False
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor], set[str]]:
    """Return a file's tensors with matrices in these layouts by turns, its metadata, the values, and which were used.

    `listed`: the layouts stand in the metadata, without the denoiser's prefix, and not beside the weights.
    """
    stored, values, used = dict[str, Tensor](), dict(tensors), set[str]()
    stated = dict[str, Any]()
    for key, tensor in tensors.items():
        fitting = [
            layout
            for layout in layouts
            if key.endswith(".weight")
            and tensor.dim() == 2
            and not tensor.shape[1] % LAYOUTS[layout][1]
        ]
        if not fitting:
            stored[key] = tensor
            continue
        layout = fitting[len(stated) % len(fitting)]
        parts, entry, values[key] = LAYOUTS[layout][0](tensor.float())
        used.add(layout)
        stored |= {f"{key}{end}": part for end, part in parts.items()}
        stated[key.removesuffix(".weight")] = entry
    if listed:
        bare = {key.removeprefix("model.diffusion_model."): entry for key, entry in stated.items()}
        return stored, {"_quantization_metadata": json.dumps({"layers": bare})}, values, used
    for key, entry in stated.items():
        stored[f"{key}.comfy_quant"] = torch.tensor(
            list(json.dumps(entry).encode()), dtype=torch.uint8
        )
    return stored, {}, values, used
