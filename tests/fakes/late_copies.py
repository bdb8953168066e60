"""A copy stream that is as late as a real one may be: nothing is copied before somebody waits."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor


class LateCopies:
    """Stands in for `CopyStream`; what reads without waiting reads the past.

    Copies run in the order in which they were started, like a stream's. Raises AssertionError when
    memory was given back before its copy: on a device, another tensor would be written over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: deque[_Copy] = deque()

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self._queue.append(_Copy(target, source))
        return self._queue[-1]

    def wait(self, done: Any) -> None:
        while done in self._queue:
            self._queue.popleft().run()


class _Copy:
    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = _Weakly(target), _Weakly(source)

    def run(self) -> None:
        self._target.tensor().copy_(self._source.tensor())


class _Weakly:
    """A tensor that is not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = self._storage()
        assert storage is not None, "memory was given back while a copy was under way"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)
