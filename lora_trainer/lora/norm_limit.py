"""Max-norm regularisation: limits the norm of each layer's update (sd-scripts: scale_weight_norms).

After Srebro & Shraibman 2005 and Srivastava et al. 2014: after each optimizer step, the factors of an
update that is too large are all scaled by the same number. Norms are computed from the factors' Gram
matrices, without the [out, in] product; only LoHa's product is formed, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.inject import AdaptedLayer

TOLERANCE = 1e-5
"""Relative excess that is tolerated: a layer scaled back to the limit may round to just above it, and the
next step would change its bits again although the optimizer did not move it."""


@torch.no_grad()
def limit_norms(adapter: Adapter, limit: float) -> None:
    """Scale the updates of trained layers whose Frobenius norm is above `limit` back to it.

    The host does not wait for the device. For LoRA, LoHa and LoKr; not for DoRA and PiSSA, whose updates
    are more than the product of the factors.
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
        # The update is the product of n factors, so each takes the n-th root of the correction.
        back = too_large.pow(-1 / len(factors))
        torch._foreach_mul_(factors, torch.where(too_large > 1 + TOLERANCE, back, 1.0))


def update_norm(layer: AdaptedLayer) -> Tensor:
    """Return the Frobenius norm of a layer's update, a float32 scalar on its device."""
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
            # The norm of a Kronecker product is the product of the norms.
            norm = _side_norm(factors, "w1") * _side_norm(factors, "w2")
        case kind:
            raise AssertionError(f"the update of {kind} has no norm of its own")
    return norm * abs(layer.width.scale)


def _side_norm(factors: Mapping[str, Tensor], name: str) -> Tensor:
    if name in factors:
        norm: Tensor = torch.linalg.vector_norm(factors[name])
        return norm
    return _product_norm(factors[f"{name}_a"], factors[f"{name}_b"])


def _product_norm(first: Tensor, second: Tensor) -> Tensor:
    """Return the Frobenius norm of `first` [m, r] @ `second` [r, n].

    Its square is the sum of (first^T first) * (second second^T), elementwise over [r, r].
    """
    # Rounding may make the sum of a tiny update negative, whose root would be NaN.
    return ((first.mT @ first) * (second @ second.mT)).sum().clamp(min=0.0).sqrt()
