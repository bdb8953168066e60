"""Counts the bytes of every tensor storage that is alive, as an allocator would see them, and the work.

Input is what runs while the mode is active, on `meta` or on a device; outputs are bytes alive now and
at the peak, FLOPs of matrix products and the number of kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lora_trainer.model.meta_kernels import MetaAnswers, kernel_workspace_bytes, outputs_of

_ATEN = torch.ops.aten
_FLOPS = {**flop_registry, _ATEN.addmm_: flop_registry[_ATEN.addmm]}
_ALLOCATIONS = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.set_,
}


class _Storage(NamedTuple):
    size_bytes: int
    number: int
    alive: weakref.ref[Any]


class LiveStorages(TorchDispatchMode):
    """While active: `now_bytes` alive of what was made inside, `peak_bytes` the most there was.

    Storages of `ignored` do not count. `flops` are those of matrix products, attention included;
    `kernels` what a device would be told to start. `events` are (number of a storage, its bytes) as it is
    made and (number, 0) as it goes, in order, with what CUDA's kernels need for themselves while they
    run: that is in no other figure.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        # Held, so that no other storage takes over the key of one that died.
        self._ignored = {storage_key(tensor): tensor.untyped_storage() for tensor in ignored}
        self._alive: dict[int, _Storage] = {}
        self._marked: set[int] = set()
        self.marking = False
        """Whether storages are marked as they are made."""
        self._answers = MetaAnswers()
        self.now_bytes = self.peak_bytes = self.flops = self.kernels = 0
        self.events: list[tuple[int, int]] = []
        self._numbers = count(1)

    @property
    def marked_bytes(self) -> int:
        """Bytes of the marked storages that are alive."""
        return sum(self._alive[key].size_bytes for key in self._marked)

    def mark(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, if it was made inside, in `marked_bytes`."""
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
        if function._schema.is_mutable:  # writes to a storage that was there before
            result = function(*args, **kwargs)
            self._work(packet, args, kwargs, result)
            return result
        result = self._answers(function, args, kwargs)
        self._work(packet, args, kwargs, result)
        for output in outputs_of(result):
            if isinstance(output, Tensor):
                self._watch(output)
        if workspace_bytes := kernel_workspace_bytes(packet, args, result):
            number = next(self._numbers)
            self.events += [(number, workspace_bytes), (number, 0)]
        return result

    def _work(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._alive or key in self._ignored:
            return
        size, number = storage.nbytes(), next(self._numbers)
        self._alive[key] = _Storage(size, number, weakref.ref(storage, lambda _: self._forget(key)))
        if size:
            self.events.append((number, size))
        self.now_bytes += size
        if self.marking:
            self._marked.add(key)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int) -> None:
        storage = self._alive.pop(key)
        self.now_bytes -= storage.size_bytes
        self._marked.discard(key)
        if storage.size_bytes:
            self.events.append((storage.number, 0))


def storage_key(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)
