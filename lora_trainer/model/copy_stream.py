"""Copies between host and device beside the computation, with the waiting that makes them right.

A CUDA device copies on a stream of its own; any other at once. Whoever starts a copy keeps both
tensors alive until a `wait` for it was queued: the allocator knows nothing of the side stream, and
telling it (`record_stream`) would hold memory back for as long as the host runs ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

Done = torch.cuda.Event | None
"""When a copy is over; None: it already is."""


class CopyStream:
    """The side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> Done:
        """Start target <- source, after all work queued so far; asynchronous where host memory is pinned."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def wait(self, done: Done) -> None:
        """Let all work queued from now on begin after a copy; the host does not wait."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
