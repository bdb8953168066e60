"""Selective checkpointing inside a block: which results of kernels are kept when all else is made again.

`selective_contexts` gives `torch.utils.checkpoint` two modes for one call of a block: in the forward pass the
first holds results that took much arithmetic for their bytes, in the recomputation the second hands
them out in the same order instead of running their kernels. Works on `meta` too.

torch's own modes for this note every kernel there is, and cannot hand out what a kernel wrote in place.
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

from lora_trainer.config.config import Checkpointing
from lora_trainer.costs.sample_cost import KEEP_ATTENTION, keeps_product
from lora_trainer.network.quantized_matmul import INT8_PRODUCT

_ATEN = torch.ops.aten
_FACTORS = {
    _ATEN.mm.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    _ATEN.addmm_.default: (1, 2),
    INT8_PRODUCT: (0, 1),
}
"""Products of matrices: which arguments are multiplied."""
SavePolicy = Callable[[Any, tuple[Any, ...]], bool]
"""Says of a kernel and its arguments whether the result is kept."""


@dataclass(frozen=True, kw_only=True)
class SelectivePolicy:
    """Attention, and the frozen products that `keeps_product` names; never those of adapters.

    `rank` is the largest of the network's adapters: what they multiply has a side as short.
    """

    checkpointing: Checkpointing
    rank: int

    def __call__(self, kernel: Any, arguments: tuple[Any, ...]) -> bool:
        """Say whether the result of this kernel is kept."""
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
        """A weight that is trained, or built of what is, belongs to an adapter."""
        if weight.requires_grad or min(fan_in, out) <= self.rank:
            return False
        return keeps_product(self.checkpointing, fan_in=fan_in, out=out)


@cache
def _is_attention(kernel: Any) -> bool:
    """All fused kernels of torch and of xformers have it in their names; `_flash` forwards of the latter too."""
    name = kernel.__name__
    return "attention" in name or "flash_fwd" in name


def selective_contexts(worth: SavePolicy) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of the forward pass and of the recomputation of one call of a block."""
    kept: deque[_Result] = deque()
    return _SavingMode(worth, kept), _ReturningMode(worth, kept)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What a kernel returned, without the graph that grew on it. Networks must not write to it."""

    kernel: Any
    value: Any

    def take(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Return it; raises RuntimeError when the block did something else than in the forward pass."""
        if self.kernel is not kernel:
            raise RuntimeError(
                f"a recomputed block asks for a result of {kernel}, and kept is one of {self.kernel}"
            )
        if (
            kernel._schema.is_mutable
        ):  # torch returns the tensor written to, whatever is returned here
            return arguments[0].set_(self.value)
        return self.value


class _SavingMode(TorchDispatchMode):
    def __init__(self, worth: SavePolicy, kept: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._worth, self._kept = worth, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code in a block runs as it is; what it computes is made again as a whole."""
        return True

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = kernel(*args, **(kwargs or {}))
        if self._worth(kernel, args):
            self._kept.append(_Result(kernel=kernel, value=_detached(result)))
        return result


class _ReturningMode(TorchDispatchMode):
    def __init__(self, worth: SavePolicy, kept: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._worth, self._kept = worth, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code in a block runs as it is."""
        return True

    def __exit__(self, *error: Any) -> None:
        """Let go of what was not asked for: a second backward pass makes everything again."""
        self._kept.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no annotation

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._kept and self._worth(kernel, args):
            return self._kept.popleft().take(kernel, args)
        return kernel(*args, **(kwargs or {}))


def _detached(result: Any) -> Any:
    """Return results as new tensors on the same storages: autograd hangs its graph on the old ones."""
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, tuple | list):
        return type(result)(map(_detached, result))
    return result
