"""Numbers on their way from the device to the host, so that nobody waits for what is queued after them.

`float(tensor)` on a card waits for everything queued so far, also for steps after the one that the
tensor belongs to: a loss that is read late is no better than one that is read at once. A `Readback`
starts the copy right behind the computation and waits for that copy alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A few numbers, float32, read from tensors of one device when the work queued so far is done."""

    def __init__(self, values: Tensor) -> None:
        self._host = values.detach()
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values.detach(), non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> list[float]:
        """Return the numbers; waits until they have arrived, not for what was queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._host.tolist()
        return found
