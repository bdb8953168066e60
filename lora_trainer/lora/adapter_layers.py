"""The layers that an adapter puts in place of frozen ones: LoRA computed with its layer, DoRA, OFT.

peft runs A and B beside the layer in float32: with a 16-bit base each layer saves a float32 copy of its
input for the backward pass, and adds and casts outputs four times. Here a linear layer is one autograd operation,
y = W x + b + s B A x: A x and B (A x) are computed in the dtype of the layer, the product with W is added in place,
and the backward pass computes A x again. Only the input itself is saved, and layers with the same input share it.
A, B and their gradients stay float32; a block casts those of all its layers at once (`network/adapter_copies.py`).

OFT (Qiu et al. 2023, arXiv 2306.07280) rotates the outputs of a frozen layer in groups of channels. peft's OFT
rotates the inputs, which no image program supports; this is the diagonal OFT of LyCORIS, ComfyUI and Forge
(`oft_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Conv2d, Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lora_trainer.lora.dropout import Mask, gated
from lora_trainer.lora.tensors import rotation
from lora_trainer.network.adapter_copies import ComputesWithCopies
from lora_trainer.network.kept_results import KeptProduct
from lora_trainer.network.quantize import QuantizedLinear, Restore, frozen_parts, frozen_weight

SMALL_LAYER = 100_000
"""Weights of a layer up to which it is computed by torch's own operations one by one (`composed`).

Kernels of such a layer take hardly longer than the Python of an operation of our own. The smallest adapted layer of a
released base has 102,400 weights (SD1.5): small layers are those of miniatures, such as the embedded base.
"""


class FusedLinear(Linear, ComputesWithCopies):
    """peft's LoRA of a linear layer, with its parameters, names and state, as one operation.

    DoRA needs more than this product and runs peft's code.
    """

    before: Sequence[Mask] = ()
    """Dropout masks of the adapter's inputs."""
    gates: Sequence[Mask] = ()
    """Masks of the adapter's ranks."""

    def copied_weights(self) -> Sequence[Tensor]:
        """Return A and B where they are computed with here and not by peft."""
        (name,) = self.active_adapters
        return () if _is_peft_s(self, name) else self._weights(name)

    def _weights(self, name: str) -> tuple[Tensor, Tensor]:
        down: Tensor = self.lora_A[name].weight  # type: ignore[assignment]  # peft's dictionaries have no types
        up: Tensor = self.lora_B[name].weight  # type: ignore[assignment]  # peft's dictionaries have no types
        return down, up

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        if _is_peft_s(self, name):
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        base: Any = self.base_layer
        # A layer computes more than W x + b where hooks copy its weights or change its output; those of
        # diffusers replace `forward`.
        forward = vars(base).get("forward")
        kept = forward if isinstance(forward, KeptProduct) else None
        is_product = (
            type(base) in (nn.Linear, QuantizedLinear)
            and not (base._forward_hooks or base._forward_pre_hooks)
            and (forward if kept is None else kept.replaced) is None
        )
        weights, scale = self._weights(name), self.scaling[name]
        masked = bool(self.before or self.gates)
        is_small = is_product and not masked and _is_small(base, x, *weights)
        if is_small and kept is None:
            return composed(x, *weights, base.weight, base.bias, scale=scale)
        update = _Update(scale=scale, gates=self.gates, as_composed=is_small)
        if self.before or not is_product:
            adapter_input = x
            if self.before:  # [samples, rows, channels], as masks take four dimensions for an image
                adapter_input = gated(x.reshape(x.shape[0], -1, x.shape[-1]), self.before)
            change: Tensor = FrozenAndLowRank.apply(  # type: ignore[no-untyped-call]  # torch gives no types
                adapter_input, *weights, update, self.copies, None, None, None
            )
            outputs: Tensor = base(x)
            return outputs + change.view(outputs.shape)
        stored, restore = frozen_parts(base)
        fused: Tensor = FrozenAndLowRank.apply(  # type: ignore[no-untyped-call]  # torch gives no types
            x, *weights, update, self.copies, kept, base.bias, restore, *stored
        )
        return fused


@dataclass(frozen=True, kw_only=True)
class _Update:
    """s gate(x A^T) B^T, and its gradients; x [..., in], A [rank, in], B [out, rank]."""

    scale: float
    gates: Sequence[Mask]
    as_composed: bool = False
    """Whether gradients get the bits of `composed`: a small layer has them whether its result is kept or not."""

    def of(self, x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the update, plus `bias`, as a new tensor [rows, out]."""
        middle, up = self.middle(x, down), up.to(x.dtype)
        if bias is None:
            return _product(middle, up.T, scale=self.scale)
        return torch.addmm(bias, middle, up.T, alpha=self.scale)

    def middle(self, x: Tensor, down: Tensor) -> Tensor:
        """Return gate(x A^T), [rows, rank]."""
        return self.gated(_flat(x) @ down.to(x.dtype).T, x)

    def gated(self, middle: Tensor, x: Tensor) -> Tensor:
        """Return [rows, rank] through the gates of the samples of `x`."""
        if not self.gates:
            return middle
        return _flat(gated(middle.view(x.shape[0], -1, middle.shape[-1]), self.gates))


class FrozenAndLowRank(torch.autograd.Function):
    """A frozen layer and the update of its adapter: W x + b + s gate(x A^T) B^T; the update alone without `restore`.

    `copies`: of A and B in the dtype of x, or empty.

    Saves x, A, B (or their copies) and the stored form of W. The output is the product with W as well, to which the
    update was added: where results are kept (`kept`), this one is, and a recomputed block computes neither again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        update: _Update,
        copies: Sequence[Tensor],
        kept: KeptProduct | None,
        bias: Tensor | None,
        restore: Restore | None,
        *stored: Tensor,
    ) -> Tensor:
        ctx.update, ctx.restore, ctx.dtypes = update, restore, (down.dtype, up.dtype)
        if copies and copies[0].dtype == x.dtype:
            down, up = copies
        ctx.save_for_backward(x, down, up, *stored)

        def computed() -> Tensor:
            outputs = update.of(x, down, up, bias)
            if restore is not None:  # in place: another tensor of [rows, out] is saved
                outputs.addmm_(_flat(x), restore(stored).T)
            return outputs

        outputs = computed() if kept is None else kept.result(computed)
        return outputs.view(*x.shape[:-1], up.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Read once only: under checkpointing a second access of `saved_tensors` raises.
        x, down, up, *stored = ctx.saved_tensors
        down = down.to(x.dtype)
        update, gradient = ctx.update, _flat(gradient)
        dtype_of_down, dtype_of_up = ctx.dtypes
        up = up.to(gradient.dtype)
        if update.as_composed:
            of_middle = (gradient @ up).mul_(update.scale)
        else:
            of_middle = update.gated(_product(gradient, up, scale=update.scale), x)
        of_x = of_down = of_up = None
        if ctx.needs_input_grad[1]:
            of_down = (of_middle.T @ _flat(x)).to(dtype_of_down)
        if ctx.needs_input_grad[2]:
            # x A^T is computed again, which takes less time than memory to save it; it is gone before x's gradient.
            of_up = _product(gradient.T, update.middle(x, down), scale=update.scale).to(dtype_of_up)
        if ctx.needs_input_grad[0]:
            of_x = of_middle @ down
            if update.as_composed:
                of_x += gradient @ ctx.restore(stored)
            elif ctx.restore is not None:
                of_x.addmm_(gradient, ctx.restore(stored))
            of_x = of_x.view(x.shape)
        return of_x, of_down, of_up, None, None, None, None, None, *(None for _ in stored)


class LeanConv2d(Conv2d):
    """peft's LoRA of a convolution, computed in the dtype of its input.

    A convolution saves its input anyway, and the adapter reads the same tensor instead of a float32 copy.
    """

    before: Sequence[Mask] = ()
    """Dropout masks of the adapter's inputs."""
    gates: Sequence[Mask] = ()
    """Masks of the adapter's ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        down: Any = self.lora_A[name]
        plain_padding = down.padding_mode == "zeros" and not isinstance(down.padding, str)
        if _is_peft_s(self, name) or not plain_padding:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        # The layer first: gradients of `x` are summed in the reverse order of these calls.
        outputs: Tensor = self.get_base_layer()(x)
        kernel = (down.stride, down.padding, down.dilation)
        middle = F.conv2d(gated(x, self.before), down.weight.to(x.dtype), None, *kernel)
        middle = gated(middle, self.gates) * self.scaling[name]
        up: Any = self.lora_B[name]
        return outputs + F.conv2d(middle, up.weight.to(x.dtype))


# The adapter class that peft uses for each class of layers, instead of its own.
CUSTOM: Mapping[type[nn.Module], type[nn.Module]] = {nn.Linear: FusedLinear, nn.Conv2d: LeanConv2d}


class LeanDora(DoraLinearLayer):
    """peft's DoRA without its product with an identity [in, in], which FSDP needs.

    The identity takes close to 1 GB in the largest layers.
    """

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:
        product: Tensor = lora_B.weight @ lora_A.weight
        return product


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


def _is_peft_s(layer: FusedLinear | LeanConv2d, name: str) -> bool:
    """Say whether a layer leaves a call to peft's code: no adapter is active, it is merged, or it is DoRA."""
    return layer.disable_adapters or layer.merged or name in layer.lora_variant


def _is_small(base: nn.Module, x: Tensor, down: Tensor, up: Tensor) -> bool:
    """Say whether a layer is one for `composed`: by its class, shape and dtypes, never by how many rows it reads.

    The number of rows depends on how a device's memory splits a batch, and other operations round otherwise.
    """
    if type(base) is not nn.Linear or base.weight.numel() > SMALL_LAYER:
        return False
    return x.dtype == down.dtype == up.dtype


def composed(
    x: Tensor, down: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, *, scale: float
) -> Tensor:
    """Return what `FrozenAndLowRank` returns, by torch's own operations, whose backward pass runs no Python.

    Saves x A^T as well, [rows, rank]. The output has the same bits; the gradient of x is a sum of two products.
    """
    rows = _flat(x)  # once: else gradients of an `x` of several layers are added in another order
    middle, up_t = rows @ down.t(), up.t()
    outputs = (
        _product(middle, up_t, scale=scale)
        if bias is None
        else torch.addmm(bias, middle, up_t, alpha=scale)
    )
    return outputs.addmm_(rows, weight.t()).view(*x.shape[:-1], up.shape[0])


def _rotated(matrices: Tensor, values: Tensor) -> Tensor:
    """Rotate the last dimension, [..., count x size], as `tensors.update` rotates the rows of a weight."""
    count, size, _ = matrices.shape
    grouped = values.unflatten(-1, (count, size))
    # `@` would copy the matrices for every row, and autograd would save the copies.
    return torch.einsum("...kn,knm->...km", grouped, matrices).flatten(-2)


def _product(a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return scale a b in one kernel."""
    unread = a.new_empty(1)  # with beta=0 `addmm` ignores it, even if it holds a NaN
    return torch.addmm(unread, a, b, beta=0, alpha=scale)


def _flat(values: Tensor) -> Tensor:
    """Return [..., channels] as [rows, channels], a view where that is possible."""
    return values.reshape(-1, values.shape[-1])
