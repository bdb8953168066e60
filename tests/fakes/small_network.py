"""A linear layer and two convolutions, frozen, and an adapter on them that does something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter, inject

MODULES = ("linear", "conv", "point")


class Network(nn.Module):
    """A linear layer of the pixels, a 3x3 convolution with a stride and a 1x1 convolution, on the same images."""

    def __init__(self, *, inputs: int = 6, out: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, out, bias=bias)
        self.conv = nn.Conv2d(inputs, out, 3, stride=2, padding=1, bias=bias)
        self.point = nn.Conv2d(inputs, out, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers of all layers, [B, numbers], for images [B, inputs, H, W]."""
        outputs = self.linear(x.flatten(2).mT), self.conv(x), self.point(x)
        return torch.cat([each.flatten(1) for each in outputs], dim=1)


def network(dtype: torch.dtype = torch.float32, **shape: Any) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(**shape).requires_grad_(False).to(dtype)


def images(count: int = 4, inputs: int = 6) -> Tensor:
    return torch.randn(count, inputs, 6, 6, generator=torch.Generator().manual_seed(5))


def adapted(
    net: nn.Module | None = None,
    *modules: str,
    seed: int = 1,
    alpha: float = 6.0,
    text: nn.Module | None = None,
    averaged: bool = False,
    **settings: Any,
) -> Adapter:
    """Return an adapter of rank 4, on all layers unless some are named, and on one of a text encoder."""
    networks, names = {"denoiser": net or network()}, {"denoiser": modules or MODULES}
    if text is not None:
        networks["text_encoder"], names["text_encoder"] = text, ("linear",)
    chosen = AdapterSettings.model_validate({"rank": 4, **settings})
    return inject(
        networks, modules=names, settings=chosen, alpha=alpha, seed=seed, averaged=averaged
    )


def awaken(adapter: Adapter, *, size: float = 0.2) -> Adapter:
    """Move every weight, so that the update is not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return adapter
