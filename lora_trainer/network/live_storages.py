"""Memory and work of a network on `meta`: bytes alive, FLOPs and kernels, as a device would have them.

`LiveStorages` is a dispatch mode that counts the bytes of all live tensor storages, as an allocator sees
them, and the work of the kernels that run while it is active, on `meta` or on a device. On `meta` torch falls
back to unfused formulas, which save far more for the backward pass (attention: every score), so
`FusedKernels` runs the fused kernels of a device there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# The device whose fused kernels are traced. `cpu` gives the memory of a float32 run on the CPU to the byte.
KernelsOf = Literal["cuda", "cpu"]
_ATEN = torch.ops.aten


class FusedKernels(TorchFunctionMode):
    """Redirects calls on meta tensors to fused kernels; calls on other tensors are unchanged."""

    def __init__(self, kernels_of: KernelsOf) -> None:
        super().__init__()
        self._cuda = kernels_of == "cuda"

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and _on_meta(*args, **kwargs):
            return _attention(self._cuda, *args, **kwargs)
        if function is F.rms_norm and self._cuda and _on_meta(*args, **kwargs):
            return _rms_norm(*args, **kwargs)
        return function(*args, **kwargs)


def _on_meta(*args: Any, **kwargs: Any) -> bool:
    first: Tensor = next(iter((*args, *kwargs.values())))
    return first.is_meta


def _attention(
    on_cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` by a fused kernel of CUDA or of the CPU, [B, heads, queries, C].

    On CUDA that is flash attention for 16 bits without a mask, else the memory-efficient kernel.
    """
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.empty_like(attn_mask, dtype=query.dtype)
    if not on_cuda:
        assert not enable_gqa, "grouped queries run unfused on the CPU"
        outputs = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and query.element_size() == 2:
        outputs = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if bias is not None:  # broadcast without memory
            bias = bias.expand(*query.shape[:3], key.shape[2])
        outputs = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = outputs[0]
    return result


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # unfused on CUDA as well
        return torch.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _FrozenRmsNorm.apply(  # type: ignore[no-untyped-call]  # torch has no annotation
        input, len(normalized_shape)
    )
    return result


class _FrozenRmsNorm(torch.autograd.Function):
    """RMS norm in one kernel per direction; saves its input and one fp32 scale per normalised vector."""

    @staticmethod
    def forward(context: Any, input: Tensor, dimensions: int) -> Tensor:
        scale = input.new_empty(input.shape[:-dimensions], dtype=torch.float32)
        context.save_for_backward(input, scale)
        return torch.zeros_like(input)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(gradient), None


_FLOPS = {**flop_registry, _ATEN.addmm_: flop_registry[_ATEN.addmm]}
_ALLOCATIONS = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.set_,
}


class LiveStorages(TorchDispatchMode):
    """Counts `now_bytes` of live storages that were created inside the mode, and their maximum `peak_bytes`.

    Storages of `ignored` do not count. `flops` are those of matrix products, attention included; `kernels`
    counts the kernels that a device would launch. Workspaces of CUDA kernels are not counted.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        # The storages are held: a freed storage's address, which is its key, could be reused by another.
        self._ignored = {storage_key(tensor): tensor.untyped_storage() for tensor in ignored}
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """Bytes of each storage; weakly, as a strong reference would keep it alive."""
        self._marked: set[int] = set()
        self.marking = False
        """Whether storages are marked as they are made."""
        self.now_bytes = self.peak_bytes = self.flops = self.kernels = 0

    @property
    def marked_bytes(self) -> int:
        """Bytes of the marked storages that are alive."""
        return sum(self._alive[key][0] for key in self._marked)

    def mark(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` in `marked_bytes`, if it was created inside the mode."""
        key = storage_key(tensor)
        if key in self._alive:
            self._marked.add(key)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, function.overloadpacket
        if function.is_view or packet is _ATEN._unsafe_view:
            return function(*args, **kwargs)
        self.kernels += packet not in _ALLOCATIONS
        result = function(*args, **kwargs)
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)
        if not function._schema.is_mutable:  # else it wrote to a storage that was there before
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self._watch(output)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._alive and key not in self._ignored:
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _: self.forget(key))
            self.create(key, storage.nbytes())

    def create(self, key: int, size: int) -> None:
        """Count a new storage."""
        self.now_bytes += size
        if self.marking:
            self._marked.add(key)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def forget(self, key: int) -> None:
        """Count a storage no more."""
        size, _ = self._alive.pop(key)
        self.now_bytes -= size
        self._marked.discard(key)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)
