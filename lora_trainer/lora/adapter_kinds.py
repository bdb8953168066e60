"""Trained parts that peft does not have as they are needed here: OFT and new tokens.

OFT (Qiu et al. 2023, arXiv 2306.07280) rotates the outputs of a frozen layer in groups of channels. peft's OFT
rotates the inputs, which no image program supports; this is the diagonal OFT of LyCORIS, ComfyUI and Forge
(`oft_blocks`).

New tokens of text encoders are trained embedding vectors beside a frozen table (pivotal tuning): Gal et al. 2022
(arXiv 2208.01618) learn the vectors of a word; Roich et al. 2021 (arXiv 2106.05744) first find such a pivot and
then tune the generator around it. The vectors are float32 whatever the dtype of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.families.base import TextEncoder
from lora_trainer.lora.tensors import rotation
from lora_trainer.network.quantize import frozen_weight


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
        """The frozen layer's weight, because networks read its dtype and device."""
        return frozen_weight(self.base_layer)

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's bias."""
        bias: Tensor | None = self.base_layer.bias  # type: ignore[assignment]  # Linear or Conv2d
        return bias

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain: Tensor = self.base_layer(inputs, *args, **kwargs)
        if not self.enabled:
            return plain
        matrices = rotation(self.blocks)
        outputs = _rotated(matrices, plain.float().movedim(self.channel_dim, -1))
        # The rotation applies to W x only, and the layer's output already contains the bias: subtract the
        # rotated bias and add the bias itself.
        if self.bias is not None:
            bias = self.bias.float()
            outputs = outputs + (bias - _rotated(matrices, bias))
        return outputs.movedim(-1, self.channel_dim).to(plain.dtype)


def _rotated(matrices: Tensor, values: Tensor) -> Tensor:
    """Rotate the last dimension, [..., count x size]: `adapter_tensors.rotate` of outputs, not weights."""
    count, size, _ = matrices.shape
    grouped = values.unflatten(-1, (count, size))
    # `@` would copy the matrices for every row, and autograd would save the copies.
    return torch.einsum("...kn,knm->...km", grouped, matrices).flatten(-2)


class ExtendedTable(nn.Module):
    """Replaces a network's token table; token numbers -1, -2, ... are rows 0, 1, ... of `vectors`."""

    def __init__(self, base_table: nn.Embedding, vectors: nn.Parameter) -> None:
        super().__init__()
        self.known, self.vectors = base_table, vectors

    def forward(self, numbers: Tensor) -> Tensor:
        """Return [..., width] in the dtype of the base's table for token numbers [...]."""
        # Both lookups run for all positions, with indices clamped into range, and `where` chooses: masks
        # of varying size would make the host wait for the device.
        base_rows: Tensor = self.known(numbers.clamp(min=0))
        new = functional.embedding((-1 - numbers).clamp(min=0), self.vectors)
        return torch.where((numbers < 0).unsqueeze(-1), new.to(base_rows.dtype), base_rows)


def add_new_tokens(
    text: TextEncoder, count: int, *, start: str | None, seed: int
) -> dict[str, nn.Parameter]:
    """Extend the tables of `text` by `count` vectors of its new word; return them, [count, width] each.

    They start at the vectors of the word `start`, repeated in turn, or at random vectors with the table's
    standard deviation. Raises RequestError for a `start` without tokens.
    """
    numbers = {} if start is None else text.numbers(start)
    vectors = {}
    for component, network in text.networks.items():
        base_table = network.get_input_embeddings()  # type: ignore[operator]  # transformers' own
        assert isinstance(base_table, nn.Embedding)
        if start is None:
            values = _random(base_table.weight, count, component=component, seed=seed)
        else:
            values = _copied(base_table.weight, numbers[component], count, start=start)
        vectors[component] = nn.Parameter(values)
        table = ExtendedTable(base_table, vectors[component])
        network.set_input_embeddings(table)  # type: ignore[operator]  # transformers' own
    return vectors


def _random(table: Tensor, count: int, *, component: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw_seed(seed, Stream.NEW_TOKENS, component))
    drawn = torch.randn(count, table.shape[1], generator=generator)
    return drawn.to(table.device) * table.float().std()


def _copied(table: Tensor, numbers: Sequence[int], count: int, *, start: str) -> Tensor:
    if not numbers:
        raise RequestError(
            f"adapter.new_tokens_from={start!r} has no tokens", fix="use a word such as person"
        )
    chosen = [numbers[index % len(numbers)] for index in range(count)]
    return table[torch.tensor(chosen, device=table.device)].float().clone()
