"""The results that recomputed blocks keep: the checkpointing levels `light` and `selective`.

Both save the results of a block that took much arithmetic for their bytes, those of attention and of frozen products,
and recompute all others. A `KeepingBlock` gives `torch.utils.checkpoint` two contexts for one call of a block: in the
first such results are saved, in the second they are returned in the same order instead of being computed.

Only the layers that compute such a result look after it. A dispatch mode around the whole block, as torch's own
selective checkpointing has, runs Python for each kernel twice, which on a fast GPU takes the host longer than
recomputing takes the GPU; and torch's cannot return results that a kernel wrote in place.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lora_trainer.config.declare import Checkpointing
from lora_trainer.network.quantize import weight_shape

_ATEN = torch.ops.aten
# Kernels of matrix products, with the position of the second factor among their arguments.
_FACTORS = {_ATEN.mm.default: 1, _ATEN.addmm.default: 2, _ATEN.addmm_.default: 2}
# Smallest fan_in / out of a matrix product that `light` keeps. A smaller ratio means an adapter's up projection
# (fan_in is the rank): recomputing it costs next to nothing.
LEAST_SHAPE = 1 / 16


def largest_rank(network: nn.Module) -> int:
    """Return the largest rank of peft's low-rank adapters in a network; 0 without any."""
    layers = (module for module in network.modules() if isinstance(module, LoraLayer))
    return max((rank for layer in layers for rank in layer.r.values()), default=0)


def product_is_kept(kind: Checkpointing, rank: int, fan_in: int, out: int) -> bool:
    """Say whether the result of a frozen product of `fan_in` inputs (a convolution's kernel counts) is kept.

    The FLOPs to recompute one byte of it grow with `fan_in`: `light` keeps all such results, `selective` only those of
    layers with more inputs than outputs. `rank` is the largest rank of the network's adapters: a factor with a side no
    longer than that is taken for an adapter's, whose products are never kept.
    """
    if min(fan_in, out) <= rank:
        return False
    return fan_in > out or (kind == "light" and fan_in >= LEAST_SHAPE * out)


def kernel_is_kept(kind: Checkpointing, rank: int, kernel: Any, arguments: tuple[Any, ...]) -> bool:
    """Say whether a kernel's result is kept: that of attention, or of a frozen product that `product_is_kept` names."""
    if kernel in _FACTORS:
        weight = arguments[_FACTORS[kernel]]
        fan_in, out = weight.shape
    elif kernel is _ATEN.convolution.default:
        weight = arguments[1]
        fan_in, out = weight[0].numel(), weight.shape[0]
    else:
        return _is_attention(kernel)
    # A weight with a gradient belongs to an adapter.
    return not weight.requires_grad and product_is_kept(kind, rank, fan_in, out)


@cache
def _is_attention(kernel: Any) -> bool:
    """Say by its name whether a kernel is a fused attention of torch or xformers ("flash_fwd" is the latter's)."""
    name = kernel.__name__
    return "attention" in name or "flash_fwd" in name


def keeping(block: nn.Module, kind: Checkpointing) -> Callable[..., Any]:
    """Return a block's forward function for the compiler, which keeps the results of this level and no others.

    torch's own modes only mark each kernel's result while the block is traced: the code that is made of it saves the
    marked ones, and no kernel is inspected in a step.
    """
    rank, forward = largest_rank(block), block.forward

    def policy(_: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if kernel_is_kept(kind, rank, kernel, args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def kept_forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **kwargs,
        )

    return kept_forward


class KeepingBlock:
    """A block whose layers save results in its forward pass, and return them when it is computed again.

    Those layers are told so inside the contexts of a call alone: outside, the block is what it was. `rank` is the
    largest rank of the network's adapters.
    """

    def __init__(self, block: nn.Module, kind: Checkpointing, rank: int) -> None:
        self._layers: list[KeptProduct] = []
        for module in block.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                out, *fan_in = weight_shape(module)
                is_trained = any(each.requires_grad for each in module.parameters(recurse=False))
                if not is_trained and product_is_kept(kind, rank, prod(fan_in), out):
                    self._layers.append(KeptProduct(module))

    def contexts(self) -> tuple[_Call, _Call]:
        """Return the contexts of the forward pass and of the recomputation of one call of the block."""
        results: deque[tuple[Any, Any]] = deque()
        return (
            _Call(self._layers, results, saves=True),
            _Call(self._layers, results, saves=False),
        )


class _Call:
    """Saves the results of one call of a block, or returns those that were saved.

    Both times the same layers ask in the same order, so results are a queue of pairs, the result with the layer or
    kernel it is of. A network must not write in place to a result after the call.
    """

    def __init__(
        self, layers: Sequence[KeptProduct], results: deque[tuple[Any, Any]], *, saves: bool
    ) -> None:
        self._layers, self._results, self._saves = layers, results, saves
        self._attention: list[_KeptAttention] = []

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.begin(self)
        self._attention = [_KeptAttention(self, *place) for place in _attention_functions()]

    def __exit__(self, *error: object) -> None:
        for function in self._attention:
            function.end()
        self._attention = []  # each refers to this call: a circle would keep results until garbage is searched for
        for layer in self._layers:
            layer.end()
        # Results that were not used are dropped, so that a second backward pass recomputes everything.
        if not self._saves:
            self._results.clear()

    def result(self, of: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, tensors without a graph; `of` is the layer or kernel whose result it is."""
        if self._saves:
            result = compute()
            # As new tensors on the same storages: the old ones would keep their autograd graph.
            self._results.append((of, tree_map_only(Tensor, Tensor.detach, result)))
            return result
        if not self._results:
            return compute()
        saved_of, value = self._results.popleft()
        if saved_of is not of:
            raise RuntimeError(
                f"a recomputed block calls {of} where the forward pass called {saved_of}"
            )
        return value


class KeptProduct:
    """Stands for the forward function of a frozen linear layer or convolution while its block is called."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._call: _Call | None = None
        self.replaced: Callable[..., Any] | None = None
        """A forward function of the layer's own, such as that of a hook of diffusers, instead of its class's."""

    def __str__(self) -> str:
        return f"{type(self._layer).__name__}{weight_shape(self._layer)}"

    def begin(self, call: _Call) -> None:
        """Take the place of the layer's forward function in a call of its block."""
        self._call = call
        self.replaced = vars(self._layer).get("forward")
        vars(self._layer)["forward"] = self  # hides the method of the class

    def end(self) -> None:
        """Give the place back."""
        del vars(self._layer)["forward"]
        if self.replaced is not None:
            vars(self._layer)["forward"] = self.replaced
        self._call = self.replaced = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call is not None
        with _KernelMode(self._call, _is_product, of=self):
            if self.replaced is not None:
                return self.replaced(*args, **kwargs)
            return type(self._layer).forward(self._layer, *args, **kwargs)

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was kept of an operation that has this product, or compute and keep it."""
        assert self._call is not None
        result: Tensor = self._call.result(self, compute)
        return result


class _KeptAttention:
    """Stands for a function of a library that computes attention while a block is called, in this thread.

    diffusers' networks look it up by its name in its module. A mode of torch that watches functions instead would run
    Python for each question about a shape too: 20 % of the host's time of a step.
    """

    def __init__(self, call: _Call, module: Any, name: str) -> None:
        self._call, self._module, self._name = call, module, name
        self._function, self._thread = getattr(module, name), get_ident()
        setattr(module, name, self)

    def end(self) -> None:
        """Give the place back."""
        setattr(self._module, self._name, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != self._thread:
            return self._function(*args, **kwargs)
        with _KernelMode(self._call, _is_attention):
            return self._function(*args, **kwargs)


def _attention_functions() -> Iterator[tuple[Any, str]]:
    yield F, "scaled_dot_product_attention"
    if (xformers := sys.modules.get("xformers.ops")) is not None:
        yield xformers, "memory_efficient_attention"


class _KernelMode(TorchDispatchMode):
    """Keeps the results of those kernels that run inside of it and are `kept`, as those `of` a layer or the kernel."""

    def __init__(self, call: _Call, kept: Callable[[Any], bool], *, of: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._call, self._kept, self._of = call, kept, of

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code inside a block is not watched and is recomputed as a whole."""
        return True

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._kept(kernel):
            return kernel(*args, **(kwargs or {}))
        return self._call.result(self._of or kernel, lambda: kernel(*args, **(kwargs or {})))


def _is_product(kernel: Any) -> bool:
    """Say whether a kernel is the product of a layer; those in place are part of operations of their own."""
    return kernel in (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.convolution.default)
