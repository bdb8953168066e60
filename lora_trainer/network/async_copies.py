"""Copies between host and device that nobody waits for until the values are needed.

`AsyncRead` copies a few numbers to the host. `float(tensor)` on a GPU waits for all work queued so far,
including the steps after the one that computed the tensor, so reading a loss late would wait as long as
reading it at once; `read` waits for its own copy alone.

`CopyStream` copies weights and inputs beside the computation: on a device with streams, on a side stream, or
on the computing stream with `beside=False`; on other devices copies run at once. The caller of `copy` keeps
both tensors alive until it has called `wait`: the allocator does not know of the side stream and would reuse
their memory. Telling it (`record_stream`) would hold memory back for as long as the host runs ahead.
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
    """A copy of a few float32 numbers to the host, queued behind the work that computes them."""

    def __init__(self, values: Tensor) -> None:
        self._host = values.detach()
        self._copied: torch.Event | None = None
        if may_copy_ahead(values.device):
            # Into pageable memory the driver copies by way of its own buffer, and the host waits for it.
            self._host = pinned().empty(values.shape, dtype=values.dtype, device=values.device)
            self._host.copy_(values.detach(), non_blocking=True)
            self._copied = mark(values.device)

    def read(self) -> list[float]:
        """Return the numbers; waits until the copy is done, not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


Done = torch.Event | None
"""An event at the end of a copy; None if the copy is over."""


class CopyStream:
    """The copies of one device; with `beside=False` they run in order with the computation."""

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self.device = device
        self._stream = side_stream(device) if beside else None

    def copy(self, target: Tensor, source: Tensor) -> Done:
        """Start target <- source, after all work queued so far; asynchronous if host memory is pinned."""
        if self._stream is None:
            target.copy_(source)
            return None
        # The source may still be computed, and the target still read, by work queued earlier.
        self._stream.wait_stream(current_stream(self.device))
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Done = self._stream.record_event()
        return event

    def wait(self, event: Done) -> None:
        """Make all work queued from now on wait for a copy; the host does not wait."""
        if event is not None:
            current_stream(self.device).wait_event(event)
