"""Stores a frozen network's linear weights in 4 or 8 bits; computes in the network's dtype.

`quantize` takes a loaded, frozen network and replaces its large linear layers in place, one by one. nf4
uses bitsandbytes' kernels in a layer of this package, because its `Linear4bit` repacks the weight in the
first pass without gradients on some CPUs, which changes results. int8 and fp8 are two lines of torch each;
torchao 0.18's weight-only tensors let autograd save every layer's dequantised copy until the backward pass
(measured), which takes more memory than bf16. Everything is stored in plain buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, package_problem
from lora_trainer.config.declare import (
    ENCODED_AT_ONCE,
    INT8_MAX,
    NF4_BLOCK,
    NF4_SCALES_BLOCK,
    Quantization,
)

# The stored tensors of a weight by name: `codes` and scales.
Stored = Mapping[str, Tensor]
# Returns a frozen weight [out, in] from its stored tensors.
Restore = Callable[[Sequence[Tensor]], Tensor]


def quantize(
    network: nn.Module,
    kind: Quantization,
    *,
    device: torch.device,
    skip: Collection[str] = (),
    settle: Callable[[nn.Module], None] | None = None,
) -> None:
    """Quantise the layers of `quantizable` in place; each goes to `device` for that and back.

    So a network in host memory is never on `device` as a whole, and the codes have the same bits wherever
    they are stored afterwards. `settle` gives a layer its weights where the network has none yet. Raises
    MachineError when nf4's library is missing.
    """
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401 - only whether it can be imported
        except BROKEN_PACKAGE as error:
            raise MachineError(
                f"memory.base_precision=nf4 needs bitsandbytes, {package_problem(error)}",
                fix="pip install -U bitsandbytes, or use --set memory.base_precision=int8",
            ) from None
    for name in quantizable(network, skip=skip):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if settle is not None:
            settle(layer)
        network.set_submodule(name, QuantizedLinear(layer, kind, device=device))


def quantizable(network: nn.Module, *, skip: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Return (fan_in, out) of the layers that `quantize` replaces, by name; works on meta weights too.

    They are the linear layers of the repeated blocks, including the blocks' modulation (a third of some
    transformers), except layers with a part of their name in `skip`. Not quantised are the embeddings of
    image, text and timestep and the final projection (one percent of the weights, but every value passes
    through them; kohya's scaled fp8 excludes the same layers, diffusers takes all linear layers), norms
    and convolutions.
    """
    lists = {name for name, module in network.named_modules() if isinstance(module, nn.ModuleList)}
    return {
        name: (layer.in_features, layer.out_features)
        for name, layer in network.named_modules()
        if type(layer) is nn.Linear
        and not set(name.split(".")) & set(skip)
        and any(name.startswith(f"{blocks}.") for blocks in lists)
    }


def frozen_weight(layer: nn.Module) -> Tensor:
    """Return the weight of a linear layer or convolution, detached; dequantised if it is quantised."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's weight; one that is quantised is not dequantised for it."""
    if isinstance(layer, QuantizedLinear):
        return layer.out_features, layer.in_features
    assert isinstance(layer.weight, Tensor)
    return tuple(layer.weight.shape)


def frozen_parts(layer: nn.Module) -> tuple[Sequence[Tensor], Restore]:
    """Return the stored tensors of a linear layer's or convolution's weight, and the function that restores it."""
    if isinstance(layer, QuantizedLinear):
        return layer.stored(), layer.restored
    assert isinstance(layer.weight, Tensor)
    return (layer.weight,), lambda stored: stored[0]


def weight_on(layer: nn.Module, device: torch.device) -> Tensor:
    """Return the weight of a linear layer or convolution on `device`, detached; it is dequantised there."""
    stored, restore = frozen_parts(layer)
    return restore([tensor.detach().to(device) for tensor in stored])


class QuantizedLinear(nn.Linear):
    """y = W x + bias with W [out, in] stored in 4 or 8 bits and dequantised for each use.

    `weight` is a dequantised copy, created at every access, in the dtype of the original layer: adapters
    read its shape, norms and singular vectors as from a plain layer. The backward pass dequantises again;
    between the passes autograd holds only the stored tensors. W is never trained.
    """

    def __init__(self, layer: nn.Linear, kind: Quantization, *, device: torch.device) -> None:
        nn.Module.__init__(self)  # nn.Linear's constructor would allocate a float32 weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kind = kind
        self.bias = layer.bias
        encode, decode = _CODECS[kind]
        weight = layer.weight.detach()
        self._shape, self._dtype = tuple(weight.shape), weight.dtype
        self._decode = partial(decode, shape=self._shape, dtype=self._dtype)
        self.is_described = False  # see `described`
        # Always encoded on `device`, as a GPU and a CPU may round a quotient differently.
        stored = encode(weight.to(device))
        self._names = tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.to(weight.device))
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in nn.Linear
        """W dequantised afresh, [out, in], without a gradient."""
        stored = self.stored()
        if self.is_described:
            return stored[0].new_empty((), dtype=self._dtype).expand(self._shape)
        return self.restored(stored)

    def forward(self, inputs: Tensor) -> Tensor:
        # Without a gradient no custom backward is needed, and torch.compile does not accept one here.
        if not inputs.requires_grad:
            return F.linear(inputs, self.weight, self.bias)
        outputs: Tensor = _FrozenLinear.apply(  # type: ignore[no-untyped-call]
            inputs, self.bias, self.restored, *self.stored()
        )
        return outputs

    def stored(self) -> list[Tensor]:
        """Return the stored tensors of W."""
        return [self.get_buffer(name) for name in self._names]

    def restored(self, stored: Sequence[Tensor]) -> Tensor:
        """Return W, dequantised from its stored tensors."""
        return self._decode(dict(zip(self._names, stored, strict=True)))


@contextmanager
def described(network: nn.Module) -> Iterator[None]:
    """Let the weights of quantised layers tell their shape, dtype and device alone in the block, not their values.

    A library that asks each layer some twenty times where its weight lies would have it restored as often, which
    takes minutes where the blocks lie in the machine's memory.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, QuantizedLinear)]
    for layer in layers:
        layer.is_described = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_described = False


class _FrozenLinear(torch.autograd.Function):
    """A linear layer whose backward pass dequantises the weight again instead of saving it."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, bias: Tensor | None, restore: Restore, *stored: Tensor
    ) -> Tensor:
        ctx.restore = restore
        ctx.save_for_backward(*stored)
        return F.linear(inputs, restore(stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors  # read once only: under checkpointing a second access raises
        return gradient @ ctx.restore(stored), None, None, *(None for _ in stored)


# ---- int8 and fp8: symmetric, one float32 scale per output


def _encode_scaled(weight: Tensor, *, dtype: torch.dtype) -> Stored:
    """Return codes and the scale of each row, float32 [out, 1]: its largest absolute value over the codes' largest."""
    rows = max(1, ENCODED_AT_ONCE // weight.shape[1])
    parts = [_encode_rows(part, dtype=dtype) for part in weight.split(rows)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _encode_rows(weight: Tensor, *, dtype: torch.dtype) -> Stored:
    largest = INT8_MAX if dtype == torch.int8 else torch.finfo(dtype).max
    scale = weight.abs().amax(dim=1, keepdim=True).float() / largest
    scale = torch.where(scale == 0, 1.0, scale)  # a non-finite row keeps a non-finite scale
    codes = weight / scale
    # Up to torch 2.10 at least a cast of a value above fp8's largest gives NaN (2.13 gives the largest). A quotient
    # may round up to such a value, and one by a denormal scale is up to 1.5 times the largest.
    codes = codes.round_() if dtype == torch.int8 else codes.clamp_(-largest, largest)
    return {"codes": codes.to(dtype), "scale": scale}


def _decode_scaled(stored: Stored, *, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Codes are exact in 16 bits, and `mul_` computes the product in float32: it is rounded only once.
    return stored["codes"].to(dtype).mul_(stored["scale"])


# ---- nf4: bitsandbytes


def _encode_nf4(weight: Tensor) -> Stored:
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    # Blocks are encoded alone, so in parts they get the same bits.
    blocks = weight.contiguous().flatten().split(ENCODED_AT_ONCE)
    encode = partial(quantize_4bit, blocksize=NF4_BLOCK, quant_type="nf4")
    encoded = [encode(part, compress_statistics=False) for part in blocks]
    codes = torch.cat([part for part, _ in encoded])
    scales = torch.cat([state.absmax for _, state in encoded])
    # bitsandbytes' own second quantisation, that of the scales: around their mean.
    mean = scales.mean()
    scale, state = quantize_blockwise(scales - mean, blocksize=NF4_SCALES_BLOCK)
    return {
        "codes": codes,
        "scale": scale,
        "scale_scale": state.absmax,
        "scale_levels": state.code,
        "scale_mean": mean,
    }


def _decode_nf4(stored: Stored, *, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    scales = QuantState(
        absmax=stored["scale_scale"],
        code=stored["scale_levels"],
        blocksize=NF4_SCALES_BLOCK,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=stored["scale"],
        offset=stored["scale_mean"],
        state2=scales,
        # As one row, because bitsandbytes' kernel for processors begins a block anew at each row: where a row is not a
        # multiple of a block, it would take the scales of other blocks. Codes are made over rows.
        shape=torch.Size((math.prod(shape),)),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    weight: Tensor = dequantize_4bit(stored["codes"], state)
    return weight.reshape(shape)


_CODECS: Mapping[Quantization, tuple[Callable[[Tensor], Stored], Callable[..., Tensor]]] = {
    "int8": (partial(_encode_scaled, dtype=torch.int8), _decode_scaled),
    "fp8": (partial(_encode_scaled, dtype=torch.float8_e4m3fn), _decode_scaled),
    "nf4": (_encode_nf4, _decode_nf4),
}
