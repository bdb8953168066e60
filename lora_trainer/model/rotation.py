"""OFT as image programs read it: the outputs of a frozen layer, rotated in groups of channels.

Qiu et al. 2023, arXiv 2306.07280. peft's OFT rotates the inputs, which no image program can read; this
is the diagonal OFT of LyCORIS, ComfyUI and Forge (`oft_blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.model.quantize import frozen_weight
from lora_trainer.output.adapter_tensors import rotation


class RotatedLayer(nn.Module):
    """y = R^T W x + bias, R of one rotation per group of output channels; starts at the identity.

    Wraps a Linear (channels last) or a Conv2d (channels second). `blocks` is float32
    [out / size, size, size]; the rotation is done in float32 whatever the layer's dtype.
    """

    def __init__(self, base_layer: nn.Module, *, out: int, size: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        device = frozen_weight(base_layer).device
        self.blocks = nn.Parameter(torch.zeros(out // size, size, size, device=device))
        self.enabled = True
        self.channel_dim = 1 if isinstance(base_layer, nn.Conv2d) else -1

    @property
    def weight(self) -> Tensor:
        """The frozen layer's own: networks look at its dtype and device."""
        return frozen_weight(self.base_layer)

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's own."""
        bias: Tensor | None = self.base_layer.bias  # type: ignore[assignment]  # Linear or Conv2d
        return bias

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain: Tensor = self.base_layer(inputs, *args, **kwargs)
        if not self.enabled:
            return plain
        matrices = rotation(self.blocks)
        outputs = _rotated(matrices, plain.float().movedim(self.channel_dim, -1))
        if self.bias is not None:  # the layer has added it already, but it is not rotated
            bias = self.bias.float()
            outputs = outputs + (bias - _rotated(matrices, bias))
        return outputs.movedim(-1, self.channel_dim).to(plain.dtype)


def _rotated(matrices: Tensor, values: Tensor) -> Tensor:
    """Rotate the last dimension, [..., count x size]: `adapter_tensors.rotate` of outputs, not weights."""
    count, size, _ = matrices.shape
    grouped = values.unflatten(-1, (count, size))
    # Not `@`: it would copy the matrices for every row, and autograd would keep the copies.
    return torch.einsum("...kn,knm->...km", grouped, matrices).flatten(-2)
