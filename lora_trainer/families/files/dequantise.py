"""The values of a quantised weight, some rows at a time, so that no weight lies in memory as float32 whole.

The layouts, and where they are described, are in quantised_layouts.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from lora_trainer.families.files.quantised_layouts import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    TILE_COLUMNS,
    TILE_ROWS,
    WeightLayout,
)

# Float32 values computed at a time, in bytes.
ROWS_BYTES = 2**25
# Bias of the exponents of E8M0.
_E8M0_BIAS = 127
# The eight magnitudes of E2M1, the fourth bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A tile of scales is four bands of so many rows, side by side in cuBLAS's order.
_BAND_ROWS = 32
# The regular Hadamard matrix of four; those of more are its Kronecker powers.
_HADAMARD = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def dequantised(
    stored: Tensor, layout: WeightLayout, beside: Mapping[str, Tensor], *, dtype: torch.dtype
) -> Tensor:
    """Return the weight that `stored` and the tensors `beside` it stand for, computed in float32, in `dtype`."""
    scales = _row_scales(stored, layout, beside)
    factors = beside[layout.input_factors].float() if layout.input_factors else None
    weight = torch.empty(layout.shape, dtype=dtype)
    if not layout.shape:
        return weight.copy_(stored.float() * scales.float().reshape(()))
    rows = max(1, ROWS_BYTES // max(1, 4 * weight[0].numel()))
    for first in range(0, layout.shape[0], rows):
        part = slice(first, min(first + rows, layout.shape[0]))
        values = _values(stored[part], layout) * scales[part if len(scales) > 1 else slice(None)]
        values = values.flatten(1)
        if layout.group:
            values = _turned_back(values, layout.group)
        if factors is not None:
            values = values * factors.flatten()
        # Columns that only fill up a block are left out.
        width = weight[0].numel()
        weight[part] = values[:, :width].reshape(weight[part].shape)
    return weight


def _values(stored: Tensor, layout: WeightLayout) -> Tensor:
    """Return stored rows as float32 [rows, blocks, block], one block where a row has one scale."""
    if layout.kind == "nvfp4":
        codes = torch.stack((stored >> 4, stored & 15), dim=-1).int()
        return _e2m1_values()[codes].reshape(len(stored), -1, NVFP4_BLOCK)
    columns = MXFP8_BLOCK if layout.kind == "mxfp8" else stored[0].numel()
    return stored.float().reshape(len(stored), -1, columns)


def _row_scales(stored: Tensor, layout: WeightLayout, beside: Mapping[str, Tensor]) -> Tensor:
    """Return float32 scales [rows or 1, blocks, 1]."""
    scale = beside[layout.scale]
    if layout.kind == "mxfp8":
        exponents = _in_rows(scale.view(torch.uint8), len(stored), stored.shape[1] // MXFP8_BLOCK)
        # As float64 the smallest power is exact too; comfy-kitchen's zero stands for blocks of zeros.
        powers = torch.exp2(exponents.double() - _E8M0_BIAS).float()
        return torch.where(exponents == 0, 0.0, powers)[..., None]
    if layout.kind == "nvfp4":
        blocks = 2 * stored.shape[1] // NVFP4_BLOCK
        scales = _in_rows(scale.view(torch.float8_e4m3fn), len(stored), blocks).float()
        return (scales * beside[layout.second_scale].float().reshape(()))[..., None]
    return scale.float().reshape(-1, 1, 1)


def _in_rows(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales in the order of their weight's rows from cuBLAS's order of tiles.

    A tile of 128 rows and 4 columns stands as 32 rows of 16: the four rows of its bands side by side.
    """
    tiles_across = -(-columns // TILE_COLUMNS)
    tiles = blocked.reshape(-1, tiles_across, _BAND_ROWS, TILE_ROWS // _BAND_ROWS, TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(-1, tiles_across * TILE_COLUMNS)
    scales: Tensor = whole[:rows, :columns]
    return scales


@cache
def _e2m1_values() -> Tensor:
    magnitudes = torch.tensor(_E2M1)
    return torch.cat((magnitudes, -magnitudes))


@cache
def _hadamard(size: int) -> Tensor:
    """Return the regular Hadamard matrix of a power of four, of length 1 in every row."""
    smallest = torch.tensor(_HADAMARD, dtype=torch.float32)
    matrix = smallest
    while len(matrix) < size:
        matrix = torch.kron(matrix, smallest)
    return matrix / math.sqrt(size)


def _turned_back(values: Tensor, group: int) -> Tensor:
    """Return rows whose groups were multiplied by the matrix; it is symmetric, so it is its own inverse."""
    turned: Tensor = values.reshape(-1, group) @ _hadamard(group)
    return turned.reshape(values.shape)
