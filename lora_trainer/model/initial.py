"""PiSSA (Meng et al. 2024, arXiv 2404.02948): a LoRA that starts at the weight's main singular vectors.

The paper writes the residual W - s B0 A0 into the frozen weight. Here the weight stays as it is and the
layer computes W x + s (B A x - B0 A0 x), which is the same function: the base is not rounded again,
stays whole for other users, and what is exported is exactly what was trained.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn

from lora_trainer.errors import RequestError

OVERSAMPLING, ITERATIONS = 8, 8


def principal_factors(
    weight: Tensor, *, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return float32 down [rank, n], up [m, rank] with up @ down the best rank-`rank` part of [m, n].

    Each takes half of every singular value. By subspace iteration (Halko et al. 2009, arXiv
    0909.4061, algorithm 4.4), exact where rank + 8 reaches the smaller side; a full decomposition of
    one layer of a large model takes half a minute. `generator` is on the CPU. Ranks beyond the
    smaller side are zero. Raises RequestError for weights that are not plain numbers.
    """
    if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise RequestError(
            "adapter.init=pissa needs the base's weights as they are, and these are quantised",
            fix="use --set adapter.init=default",
        )
    values = weight.detach().float()
    outputs, inputs = values.shape
    width = min(rank + OVERSAMPLING, outputs, inputs)
    start = torch.randn(inputs, width, generator=generator).to(values.device)
    basis = torch.linalg.qr(values @ start).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(values @ torch.linalg.qr(values.T @ basis).Q).Q
    left, singular, right = torch.linalg.svd(basis.T @ values, full_matrices=False)
    kept = min(rank, width)
    roots = singular[:kept].sqrt()
    down = values.new_zeros(rank, inputs)
    up = values.new_zeros(outputs, rank)
    down[:kept] = roots[:, None] * right[:kept]
    up[:, :kept] = (basis @ left[:, :kept]) * roots
    return down, up


class InitialVariant(LoraVariant):
    """The forward pass of a LoRA from which the product it started at is taken away."""

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """Return `result` + scale (up down - up0 down0) x: `result` while nothing has moved."""
        live = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        start = module.initial_up(module.initial_down(x))
        changed: Tensor = result + (live - start) * module.scaling[active_adapter]
        return changed


def start_at(layer: Any, name: str, *, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Set both the live and the taken-away pair of a peft layer; return the latter, frozen."""
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
