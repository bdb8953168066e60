"""Max-norm regularisation: no layer's update may be larger than a limit (sd-scripts: scale_weight_norms).

After Srebro & Shraibman 2005 and Srivastava et al. 2014: after each optimizer step, the factors of an
update that is too large are scaled back alike. Norms come from the factors' Gram matrices; only
LoHa's product is formed, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.inject import AdaptedLayer

TOLERANCE = 1e-5
"""Relative excess that is left alone: a layer scaled back to the limit may round to just above it, and
a step that changes no weight must leave its bits."""


@torch.no_grad()
def limit_norms(adapter: Adapter, limit: float) -> None:
    """Scale the updates of trained layers whose Frobenius norm is above `limit` back to it.

    Nothing waits for the device. For LoRA, LoHa and LoKr; not for DoRA and PiSSA, whose updates are
    more than the product of the factors.
    """
    layers = [
        layer
        for layer in adapter.layers.values()
        if any(parameter.requires_grad for parameter in layer.parameters.values())
    ]
    norms = torch.stack([update_norm(layer) for layer in layers])
    excess = norms / limit
    for layer, too_large in zip(layers, excess.unbind(), strict=True):
        factors: list[Tensor] = list(layer.parameters.values())
        back = too_large.pow(-1 / len(factors))
        torch._foreach_mul_(factors, torch.where(too_large > 1 + TOLERANCE, back, 1.0))


def update_norm(layer: AdaptedLayer) -> Tensor:
    """Return the Frobenius norm of what a layer adds to its weight, as a float32 scalar on its device."""
    factors: Mapping[str, Tensor] = {
        name: parameter.detach().flatten(1) for name, parameter in layer.parameters.items()
    }
    match layer.kind:
        case "lora":
            norm = _product_norm(factors["up"], factors["down"])
        case "loha":
            first = factors["w1_a"] @ factors["w1_b"]
            norm = torch.linalg.vector_norm(first * (factors["w2_a"] @ factors["w2_b"]))
        case "lokr":
            norm = _side_norm(factors, "w1") * _side_norm(factors, "w2")
        case kind:
            raise AssertionError(f"the update of {kind} has no norm of its own")
    return norm * abs(layer.width.scale)


def _side_norm(factors: Mapping[str, Tensor], name: str) -> Tensor:
    if name in factors:
        norm: Tensor = torch.linalg.vector_norm(factors[name])
        return norm
    return _product_norm(factors[f"{name}_a"], factors[f"{name}_b"])


def _product_norm(left: Tensor, right: Tensor) -> Tensor:
    """Return |left right| of [m, r] and [r, n]: the sum of (left^T left) * (right right^T)."""
    return ((left.mT @ left) * (right @ right.mT)).sum().clamp(min=0.0).sqrt()
