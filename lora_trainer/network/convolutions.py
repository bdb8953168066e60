"""How a network's convolutions are computed: the layout of their weights, and whether cuDNN times its algorithms.

Input: a network on its device, its adapter in place; output: a switch that may be turned between two steps. Every way
computes the same convolutions, so its numbers are those of another way up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lora_trainer.config.declare import ConvolutionWay


class Convolutions:
    """The convolutions of a network; `choose` changes its frozen weights in place, values stay the same.

    `on_pass` is called with the shape of the latents, (images, channels, height, width), when a pass begins.
    """

    def __init__(self, network: nn.Module, way: ConvolutionWay = "plain") -> None:
        # A 1x1 kernel has both layouts at once. The adapter's own convolutions stay as the optimizer knows them.
        self._layers = [
            module
            for module in network.modules()
            if isinstance(module, nn.Conv2d)
            and module.weight.shape[2:].numel() > 1
            and not module.weight.requires_grad
        ]
        self.on_pass: Callable[[torch.Size], None] = lambda shape: None
        self.way: ConvolutionWay = "plain"
        self.choose(way)

    def choose(self, way: ConvolutionWay) -> None:
        """Compute in another way from the next pass on."""
        is_last = way in ("channels_last", "both")
        layout = torch.channels_last if is_last else torch.contiguous_format
        for layer in self._layers:
            # A convolution takes the layout of its weight for its input and output too.
            layer.weight.data = layer.weight.detach().contiguous(memory_format=layout)
        self.way = way

    @contextmanager
    def used(self, shape: torch.Size) -> Iterator[None]:
        """Run a pass over latents of this shape in the chosen way, its backward pass included.

        cuDNN times its algorithms for every new shape, with workspaces of any size, so it does not do that outside:
        sample images and the VAE have shapes of their own, and little memory is left for them.
        """
        self.on_pass(shape)
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.way in ("benchmark", "both")
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
