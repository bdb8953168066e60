"""Tensors that are known by shape and dtype and have no values yet, so that a base need not lie in memory whole.

diffusers' conversions rename, split and join the tensors of a file. Run on deferred tensors they read nothing: each
result remembers what it is made of, and is made when its layer asks. Then the layer is quantised, and the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lora_trainer.common.processes import give_back_heap
from lora_trainer.families.files.weight_files import TensorReader, read_header

# What torch's functions return that can be made later.
_DEFERRED_TYPES = ("Tensor", "List[Tensor]")


class Deferred(Tensor):
    """A tensor whose values `value` makes; what torch computes from it is deferred too."""

    described: Tensor
    """The same tensor on `meta`."""
    value: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, described: Tensor, value: Callable[[], Tensor]) -> Deferred:
        made = Tensor._make_wrapper_subclass(
            cls,
            described.shape,
            strides=described.stride(),
            dtype=described.dtype,
            device=torch.device("cpu"),
        )
        made.described, made.value = described, value
        deferred: Deferred = made
        return deferred

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return f"Deferred({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}

        def made() -> Any:
            return func(*tree_map(settled, args), **tree_map(settled, kwargs))

        if not all(str(each.type) in _DEFERRED_TYPES for each in func._schema.returns):
            return made()  # a number that is asked of a tensor
        described = func(*tree_map(_described, args), **tree_map(_described, kwargs))
        if isinstance(described, Tensor):
            return cls(described, made)
        parts = (cls(part, partial(_part, made, at)) for at, part in enumerate(described))
        return type(described)(parts)


def _part(made: Callable[[], Any], at: int) -> Any:
    return made()[at]


def _described(value: Any) -> Any:
    return value.described if isinstance(value, Deferred) else value


def settled(value: Any) -> Any:
    """Return the tensor that a deferred one stands for, and anything else as it is."""
    return value.value() if isinstance(value, Deferred) else value


class DeferredFiles:
    """The files of one network, of whose tensors one at a time is read, when its values are asked for.

    `dtype` and `fp32` as in `TensorReader`.

    A tensor from which several layers are made is kept until another is read.
    """

    def __init__(self, *, dtype: torch.dtype, fp32: Collection[str] = ()) -> None:
        self._dtype, self._fp32 = dtype, fp32
        self._last: tuple[TensorReader | None, str, Tensor | None] = (None, "", None)

    def __enter__(self) -> DeferredFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go(None)

    def tensors(self, file: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return deferred tensors of a file, wanted name -> tensor; `names` maps it to the name in the file."""
        reader = TensorReader(file, dtype=self._dtype, fp32=self._fp32, copies=True)
        header = read_header(file)
        return {
            name: Deferred(
                torch.empty(header[stored].shape, dtype=reader.dtype_of(stored), device="meta"),
                partial(self._read, reader, stored),
            )
            for name, stored in names.items()
        }

    def _read(self, reader: TensorReader, name: str) -> Tensor:
        kept = self._last[2]
        if kept is None or self._last[:2] != (reader, name):
            del kept
            self._let_go(reader)
            give_back_heap()  # what encoding the layer before has left between the codes that stay
            kept = reader.read(name)
            self._last = (reader, name, kept)
        return kept

    def _let_go(self, but: TensorReader | None) -> None:
        """Free the tensor that is kept, and close its file unless it is that of `but`."""
        reader = self._last[0]
        self._last = (but, "", None)
        if reader is not None and reader is not but:
            reader.close()


def settled_when_called(network: nn.Module, *, device: torch.device) -> None:
    """Let each layer of a network of deferred parameters have their values on `device` while it runs, and no longer."""
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        own = dict(module.named_parameters(recurse=False))
        if own:
            module.register_forward_pre_hook(partial(_settle, device=device))
            module.register_forward_hook(partial(_put_back, own))


def _settle(module: nn.Module, _inputs: Any, *, device: torch.device) -> None:
    settle(module, device=device)


def _put_back(own: Mapping[str, nn.Parameter], module: nn.Module, *_passed: Any) -> None:
    for name, parameter in own.items():
        setattr(module, name, parameter)


def settle(module: nn.Module, *, device: torch.device) -> None:
    """Give a module's own deferred parameters and buffers their values, on `device`; those of its children stay."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, Deferred):
            value = nn.Parameter(settled(parameter).to(device), requires_grad=False)
            setattr(module, name, value)
    for name, buffer in module.named_buffers(recurse=False):
        if isinstance(buffer, Deferred):
            setattr(module, name, settled(buffer).to(device))
