"""A LoRA on a frozen linear layer as one operation: y = W x + b + s B A x.

peft runs A and B beside the layer in float32: with a base in 16 bits each layer keeps a float32 copy of
its input, and adds and casts outputs four times. Here A x and B (A x) are computed in the dtype of the
layer, the product with W is added to them in place, and the backward pass makes A x again: what is
kept is the input as it is, which layers that read the same one share. The masters A and B stay
float32, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lora_trainer.model.quantize import QuantizedLinear, Restored, frozen_parts

Gate = Callable[[Tensor], Tensor]
"""Multiplies [..., channels] by a mask that stays in force until the backward pass is over."""


class FusedLinear(Linear):
    """peft's LoRA of a linear layer, with its parameters, names and state, as one operation.

    DoRA and PiSSA need more than the product: they are computed as peft does. `before` drops inputs of
    the adapter, `gates` drop ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[Gate] = []
        self.gates: list[Gate] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        if self.disable_adapters or self.merged or name in self.lora_variant:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        base = self.get_base_layer()
        update = _Update(scale=self.scaling[name], gates=self.gates)
        weights = (self.lora_A[name].weight, self.lora_B[name].weight)
        if self.before or not _is_product(base):
            given = _gated(x, self.before)
            beside: Tensor = base(x) + LowRank.apply(given, *weights, update)  # type: ignore[no-untyped-call]
            return beside
        stored, restored = frozen_parts(base)
        fused: Tensor = FrozenAndLowRank.apply(  # type: ignore[no-untyped-call]
            x, *weights, update, base.bias, restored, *stored
        )
        return fused


def _is_product(layer: nn.Module) -> bool:
    """Say whether a layer is W x + b and no more: hooks may bring its weights or change its output."""
    return (
        type(layer) in (nn.Linear, QuantizedLinear)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in vars(layer)  # diffusers' hooks
    )


@dataclass(frozen=True, kw_only=True)
class _Update:
    """s gate(x A^T) B^T, and its gradients; x [rows, in], A [rank, in], B [out, rank]."""

    scale: float
    gates: Sequence[Gate]

    def of(self, x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return it, plus `bias`, as a new [rows, out]; x may be [..., in]."""
        start = bias if bias is not None else x.new_empty(1)  # times 0: never read
        return torch.addmm(
            start,
            _flat(self._middle(x, down)),
            up.to(x.dtype).T,
            beta=0 if bias is None else 1,
            alpha=self.scale,
        )

    def of_weights(
        self, gradient: Tensor, x: Tensor, down: Tensor, up: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the middle, and of A and B if `needed`; x A^T is made again."""
        of_middle = _gated(gradient @ up.to(gradient.dtype), self.gates).mul_(self.scale)
        of_down = of_up = None
        if needed[0]:
            of_down = (_flat(of_middle).T @ _flat(x)).to(down.dtype)
        if needed[1]:
            middle = _flat(self._middle(x, down))
            of_up = (_flat(gradient).T @ middle).to(up.dtype).mul_(self.scale)
        return of_middle, of_down, of_up

    def _middle(self, x: Tensor, down: Tensor) -> Tensor:
        return _gated(x @ down.to(x.dtype).T, self.gates)


class FrozenAndLowRank(torch.autograd.Function):
    """A frozen layer and the update of its adapter: W x + b + s gate(x A^T) B^T.

    Keeps x and what W is made of. The product with W comes last, and its result is what is returned:
    so a checkpoint that keeps results of products can keep this one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        update: _Update,
        bias: Tensor | None,
        restored: Restored,
        *stored: Tensor,
    ) -> Tensor:
        ctx.update, ctx.restored = update, restored
        ctx.save_for_backward(x, down, up, *stored)
        outputs = update.of(x, down, up, bias).addmm_(_flat(x), restored(stored).T)
        return outputs.view(*x.shape[:-1], up.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, *stored = ctx.saved_tensors  # once: checkpointing unpacks nothing twice
        of_middle, of_down, of_up = ctx.update.of_weights(
            gradient, x, down, up, ctx.needs_input_grad[1:3]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _flat(of_middle) @ down.to(x.dtype)
            of_x = of_x.addmm_(_flat(gradient), ctx.restored(stored)).view(x.shape)
        return of_x, of_down, of_up, None, None, None, *(None for _ in stored)


class LowRank(torch.autograd.Function):
    """The update alone, s gate(x A^T) B^T. Keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, update: _Update) -> Tensor:
        ctx.update = update
        ctx.save_for_backward(x, down, up)
        return update.of(x, down, up).view(*x.shape[:-1], up.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up = ctx.saved_tensors
        of_middle, of_down, of_up = ctx.update.of_weights(
            gradient, x, down, up, ctx.needs_input_grad[1:3]
        )
        of_x = of_middle @ down.to(x.dtype) if ctx.needs_input_grad[0] else None
        return of_x, of_down, of_up, None


def _gated(values: Tensor, gates: Sequence[Gate]) -> Tensor:
    for gate in gates:
        values = gate(values)
    return values


def _flat(values: Tensor) -> Tensor:
    """Return [..., channels] as [rows, channels], a view where that is possible."""
    return values.reshape(-1, values.shape[-1])
