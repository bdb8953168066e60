"""Selective checkpointing inside a block: saves chosen results of kernels and recomputes all others.

`selective_contexts` gives `torch.utils.checkpoint` two dispatch modes for one call of a block. In the forward pass the
first saves results that took much arithmetic for their bytes; in the recomputation the second returns them
in the same order instead of running their kernels. Works on `meta` too.

torch's own modes for this record every kernel, and cannot return results that a kernel wrote in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.config.declare import KEEP_ATTENTION, Checkpointing
from lora_trainer.network.quantized_matmul import INT8_PRODUCT

_ATEN = torch.ops.aten
_FACTORS = {
    _ATEN.mm.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    _ATEN.addmm_.default: (1, 2),
    INT8_PRODUCT: (0, 1),
}
"""Kernels of matrix products, with the positions of the two factors among their arguments."""
LEAST_SHAPE = 1 / 16
"""Smallest fan_in / out of a matrix product that `light` keeps. A smaller ratio means an adapter's up
projection (fan_in is the rank): recomputing it costs next to nothing."""
SavePolicy = Callable[[Any, tuple[Any, ...]], bool]
"""Says whether the result of a kernel, called with these arguments, is saved."""


def keeps_product(checkpointing: Checkpointing, *, fan_in: int, out: int) -> bool:
    """Return whether a recomputed block keeps a frozen layer's output; `fan_in` counts a convolution's kernel.

    The FLOPs to recompute one byte of output grow with `fan_in`: `light` keeps all such outputs,
    `selective` only those of layers with more inputs than outputs.
    """
    if checkpointing == "light":
        return fan_in >= LEAST_SHAPE * out
    return checkpointing == "selective" and fan_in > out


@dataclass(frozen=True, kw_only=True)
class SelectivePolicy:
    """Saves results of attention and of the frozen products for which `keeps_product` holds.

    Products of adapters are never saved. `rank` is the largest rank of the network's adapters: a factor
    with a side no longer than that is taken for an adapter's.
    """

    checkpointing: Checkpointing
    rank: int

    def __call__(self, kernel: Any, arguments: tuple[Any, ...]) -> bool:
        """Say whether the result of this kernel is saved."""
        if self.checkpointing not in KEEP_ATTENTION:
            return False
        if kernel in _FACTORS:
            first, second = _FACTORS[kernel]
            return self._keeps(arguments[second], *arguments[second].shape)
        if kernel is _ATEN.convolution.default:
            weight = arguments[1]
            return self._keeps(weight, weight[0].numel(), weight.shape[0])
        return _is_attention(kernel)

    def _keeps(self, weight: Tensor, fan_in: int, out: int) -> bool:
        """Say whether a product with `weight` is saved; a weight with a gradient belongs to an adapter."""
        if weight.requires_grad or min(fan_in, out) <= self.rank:
            return False
        return keeps_product(self.checkpointing, fan_in=fan_in, out=out)


@cache
def _is_attention(kernel: Any) -> bool:
    """Say by its name whether a kernel is a fused attention of torch or xformers ("flash_fwd" is the latter's)."""
    name = kernel.__name__
    return "attention" in name or "flash_fwd" in name


def selective_contexts(worth: SavePolicy) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of the forward pass and of the recomputation of one call of a block."""
    results: deque[tuple[Any, Any]] = deque()
    return _SavingMode(worth, results), _ReturningMode(worth, results)


class _KernelMode(TorchDispatchMode):
    """Meets the kernels of one call of a block. Both modes ask `worth` the same question of the same kernels
    in the same order, so the (kernel, detached result) pairs are a queue: no result needs a key.

    A network must not write in place to a result after the call.
    """

    def __init__(self, worth: SavePolicy, results: deque[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._worth, self._results = worth, results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code inside a block is not watched and is recomputed as a whole."""
        return True


class _SavingMode(_KernelMode):
    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = kernel(*args, **(kwargs or {}))
        if self._worth(kernel, args):
            self._results.append((kernel, _detached(result)))
        return result


class _ReturningMode(_KernelMode):
    def __exit__(self, *error: Any) -> None:
        """Drop results that were not used, so that a second backward pass recomputes everything."""
        self._results.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no annotation

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._results or not self._worth(kernel, args):
            return kernel(*args, **(kwargs or {}))
        saved_kernel, value = self._results.popleft()
        if saved_kernel is not kernel:
            raise RuntimeError(
                f"a recomputed block calls {kernel} where the forward pass called {saved_kernel}"
            )
        # torch returns the tensor that a kernel has written to, whatever is returned here.
        return args[0].set_(value) if kernel._schema.is_mutable else value


def _detached(result: Any) -> Any:
    """Return results as new tensors on the same storages; the old ones would keep their autograd graph."""
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, tuple | list):
        return type(result)(map(_detached, result))
    return result
