"""Trained parts that peft does not have as they are needed here: PiSSA, OFT and new tokens.

PiSSA (Meng et al. 2024, arXiv 2404.02948): a LoRA that starts at the weight's main singular vectors. The paper
writes the residual W - s B0 A0 into the frozen weight. Here the weight is unchanged and the layer computes
W x + s (B A x - B0 A0 x), which is the same function. So the base is not rounded again, other users of it see it
unchanged, and the export is exactly the trained update.

OFT (Qiu et al. 2023, arXiv 2306.07280) rotates the outputs of a frozen layer in groups of channels. peft's OFT
rotates the inputs, which no image program supports; this is the diagonal OFT of LyCORIS, ComfyUI and Forge
(`oft_blocks`).

New tokens of text encoders are trained embedding vectors beside a frozen table (pivotal tuning): Gal et al. 2022
(arXiv 2208.01618) learn the vectors of a word; Roich et al. 2021 (arXiv 2106.05744) first find such a pivot and
then tune the generator around it. The vectors are float32 whatever the dtype of the table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.families.base import TextEncoder
from lora_trainer.lora.low_rank import leading_basis
from lora_trainer.lora.tensors import rotation
from lora_trainer.network.quantize import frozen_weight

PISSA_OVERSAMPLING = 8


def principal_factors(
    weight: Tensor, *, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return float32 down [rank, n], up [m, rank] with up @ down the best rank-`rank` part of [m, n].

    Each factor takes the square root of every singular value. Computed by subspace iteration (Halko et al.
    2009, arXiv 0909.4061, algorithm 4.4), which is exact if rank + 8 reaches the smaller side; a full
    decomposition of one layer of a large model takes half a minute. `generator` is on the CPU. Ranks
    beyond the smaller side are zero. Raises RequestError for quantised weights.
    """
    if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise RequestError(
            "adapter.init=pissa needs the base's weights as they are, and these are quantised",
            fix="use --set adapter.init=default",
        )
    values = weight.detach().float()
    outputs, inputs = values.shape
    # A few columns more than needed make the iteration converge on the last wanted singular vectors.
    width = min(rank + PISSA_OVERSAMPLING, outputs, inputs)
    # Drawn on the CPU, so that the start is the same on every device.
    start = torch.randn(inputs, width, generator=generator).to(values.device)
    basis = leading_basis(values, start)
    left_vectors, singular, right_vectors = torch.linalg.svd(basis.T @ values, full_matrices=False)
    used_rank = min(rank, width)
    roots = singular[:used_rank].sqrt()
    down = values.new_zeros(rank, inputs)
    up = values.new_zeros(outputs, rank)
    down[:used_rank] = roots[:, None] * right_vectors[:used_rank]
    up[:, :used_rank] = (basis @ left_vectors[:, :used_rank]) * roots
    return down, up


class InitialVariant(LoraVariant):
    """peft's forward pass of a LoRA minus the product of its initial factors."""

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """Return `result` + scale (up down - up0 down0) x, which is `result` before the first update."""
        live = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        start = module.initial_up(module.initial_down(x))
        changed: Tensor = result + (live - start) * module.scaling[active_adapter]
        return changed


def start_at(layer: Any, name: str, *, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Set the trained and the subtracted factors of a peft layer; return the latter, frozen, by side."""
    frozen: dict[str, Tensor] = {}
    for side, modules, values in (("down", layer.lora_A, down), ("up", layer.lora_B, up)):
        live: nn.Module = modules[name]
        weight = live.get_parameter("weight")
        with torch.no_grad():
            weight.copy_(values.reshape(weight.shape))
        still = copy.deepcopy(live).requires_grad_(False)
        setattr(layer, f"initial_{side}", still)
        frozen[side] = still.get_parameter("weight")
    layer.lora_variant[name] = InitialVariant()
    return frozen


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
