"""Kernels on the `meta` device, from memory where they have run on tensors of the same sizes before.

There a kernel is Python that works out the sizes of its outputs, for a third of a millisecond, and its FLOPs are
counted in Python too. Networks repeat their blocks, so most kernels of a trace have run before: then new outputs are
made from the sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_FLOPS = {
    **flop_registry,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    # torch counts these two from 2.15 on.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


class _Like(NamedTuple):
    """The sizes of a tensor on `meta`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Value(NamedTuple):
    """What is not a tensor, with its type, as 1, 1.0 and True are equal; a list's or tuple's are described too."""

    kind: type
    value: Any


_Described = _Like | _Value


class _Effect(NamedTuple):
    """What a kernel does: `outputs` are None where it gives back its first argument, in which it wrote."""

    outputs: _Described | None
    flops: int


class _ElsewhereError(Exception):
    """A tensor is not on `meta`: its values may decide what a kernel does."""


def run(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    """Return what `function(*args, **kwargs)` returns, in new storages where its own would be new, and its FLOPs.

    FLOPs are those of matrix products, attention included.
    """
    try:
        words = _described(list(kwargs.items()))
        effect = _effect(function, _described(args), words)
    except (_ElsewhereError, TypeError):  # TypeError: an argument without a hash
        effect = None
    if effect is None:
        result = function(*args, **kwargs)
        return result, _flops(function, args, kwargs, result)
    return args[0] if effect.outputs is None else _built(effect.outputs), effect.flops


def _described(value: Any) -> _Described:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _ElsewhereError
        return _Like(value.shape, value.stride(), value.dtype)
    kind = type(value)
    return _Value(kind, tuple(map(_described, value)) if kind in (list, tuple) else value)


def _built(described: _Described) -> Any:
    if isinstance(described, _Like):
        shape, stride, dtype = described
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    kind, value = described
    return kind(map(_built, value)) if kind in (list, tuple) else value


def _flops(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    count = _FLOPS.get(function.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


@lru_cache(maxsize=50_000)
def _effect(function: Any, arguments: _Described, words: _Described) -> _Effect | None:
    """Run a kernel on tensors of these sizes; None if it neither writes in place nor makes new outputs."""
    args, kwargs = _built(arguments), dict(_built(words))
    given = [*_storages(args), *_storages(list(kwargs.values()))]
    result = function(*args, **kwargs)
    flops = _flops(function, args, kwargs, result)
    if function._schema.is_mutable:
        unchanged = [*_storages(args), *_storages(list(kwargs.values()))] == given
        in_place = bool(args) and result is args[0] and unchanged
        return _Effect(None, flops) if in_place and _described(args) == arguments else None
    made = list(_storages(result))
    try:
        outputs = _described(result)
    except _ElsewhereError:
        return None
    # A view, an output twice, or one within a larger storage is not what `_built` makes.
    as_built = [nbytes for _, nbytes in _storages(_built(outputs))]
    is_new = {key for key, _ in made}.isdisjoint(key for key, _ in given)
    is_own = len({key for key, _ in made}) == len(made)
    is_built = is_new and is_own and [nbytes for _, nbytes in made] == as_built
    return _Effect(outputs, flops) if is_built else None


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of the storage of each tensor."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        yield int(storage._cdata), storage.nbytes()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _storages(each)
