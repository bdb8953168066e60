"""Copies between host and device that nobody waits for until the values are needed.

Numbers on their way from the device to the host, so that nobody waits for what is queued after them.

`float(tensor)` on a card waits for everything queued so far, also for steps after the one that the
tensor belongs to: a loss that is read late is no better than one that is read at once. A `AsyncRead`
starts the copy right behind the computation and waits for that copy alone.

Copies between host and device beside the computation, with the waiting that makes them right.

A device with streams copies on one of its own, or in turn with the computation where that is wanted; any
other at once. Whoever starts a copy keeps both tensors alive until a `wait` for it was queued: the
allocator knows nothing of the side stream, and telling it (`record_stream`) would hold memory back for as
long as the host runs ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_trainer.hardware.device_calls import (
    current_stream,
    mark,
    may_copy_ahead,
    on_stream,
    side_stream,
)
from lora_trainer.network.pinned_memory import pinned


class AsyncRead:
    """A few numbers, float32, read from tensors of one device when the work queued so far is done."""

    def __init__(self, values: Tensor) -> None:
        self._host = values.detach()
        self._copied: torch.Event | None = None
        if may_copy_ahead(values.device):
            self._host = pinned().empty(values.shape, dtype=values.dtype, device=values.device)
            self._host.copy_(values.detach(), non_blocking=True)
            self._copied = mark(values.device)

    def read(self) -> list[float]:
        """Return the numbers; waits until they have arrived, not for what was queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._host.tolist()
        return found


Done = torch.Event | None
"""When a copy is over; None: it already is."""


class CopyStream:
    """The side stream of one device; not `beside` the computation, copies are work like any other."""

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self.device = device
        self._stream = side_stream(device) if beside else None

    def copy(self, target: Tensor, source: Tensor) -> Done:
        """Start target <- source, after all work queued so far; asynchronous where host memory is pinned."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(current_stream(self.device))
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            done: Done = self._stream.record_event()
        return done

    def wait(self, done: Done) -> None:
        """Let all work queued from now on begin after a copy; the host does not wait."""
        if done is not None:
            current_stream(self.device).wait_event(done)
