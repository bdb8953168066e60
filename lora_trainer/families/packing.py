"""Latents as the tokens of FLUX-like transformers: 2x2 squares, channels before rows before columns.

Float [B, C, H, W] to [B, H/2 W/2, 4 C] and back, and the position of each token. Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """Return [B, H/2 W/2, 4 C] of [B, C, H, W]; height and width are even."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(tokens: Tensor, *, height: int, width: int) -> Tensor:
    """Return [B, C, height, width] in latents of [B, height/2 width/2, 4 C]."""
    batch, _, channels = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def position_ids(latents: Tensor) -> Tensor:
    """Return float32 [H/2 W/2, 3]: 0, row, column of each token of [B, C, H, W]."""
    import torch

    rows = torch.arange(latents.shape[-2] // 2, device=latents.device)
    columns = torch.arange(latents.shape[-1] // 2, device=latents.device)
    grid = torch.cartesian_prod(rows, columns).reshape(-1, 2).float()
    return torch.nn.functional.pad(grid, (1, 0))
