"""Counts the bytes of every tensor storage that is alive, as an allocator would see them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active: `now_bytes` alive of what was made inside, `peak_bytes` the most there was."""

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._ignored = {_storage_id(tensor) for tensor in ignored}
        self._alive: dict[int, int] = {}
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_id(tensor)
        if key in self._alive or key in self._ignored:
            return
        self._alive[key] = storage.nbytes()
        self.now_bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._alive.pop(key)


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
