"""Random low-rank updates of a network's linear layers, and the network they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Update = Mapping[str, tuple[Tensor, Tensor]]
"""Module name -> (down [2, in], up [out, 2])."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float32 numbers that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_update(names: Sequence[str], network: nn.Module) -> Update:
    """Return an update of rank 2 for each module."""
    found = {}
    for number, name in enumerate(names):
        out, fan_in = network.get_parameter(f"{name}.weight").shape
        found[name] = (draw(2, fan_in, seed=number), 0.1 * draw(out, 2, seed=1000 + number))
    return found


def merge(network: nn.Module, update: Update) -> None:
    """Add each product to its weight."""
    for name, (down, up) in update.items():
        network.get_parameter(f"{name}.weight").data += up @ down
