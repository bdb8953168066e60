"""Numbers on their way from the device to the host, so that nobody waits for what is queued after them.

`float(tensor)` on a card waits for everything queued so far, also for steps after the one that the
tensor belongs to: a loss that is read late is no better than one that is read at once. A `Readback`
starts the copy right behind the computation and waits for that copy alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_trainer.device_calls import mark, may_copy_ahead
from lora_trainer.model.pinned_memory import pinned


class Readback:
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
