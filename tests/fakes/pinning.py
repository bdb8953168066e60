"""A driver that pins host memory up to a bound and refuses more, for a run on the processor.

Everything that a GPU's copies would need pinned asks for it; what is pinned is ordinary memory, counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lora_trainer.network import pinned_memory
from lora_trainer.planning import plan
from lora_trainer.planning.memory_choice import MemoryChooser

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""
REFUSAL = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


@dataclass(kw_only=True)
class PinningDriver:
    """`bytes` are pinned now, at most `most_bytes`; `in_place` lists the sizes that were registered."""

    most_bytes: float
    bytes: int = 0
    peak_bytes: int = 0
    refusals: int = 0
    cleared: int = 0
    in_place: list[int] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)

    def takes(self, size: int) -> bool:
        if self.bytes + size > self.most_bytes:
            self.refusals += 1
            return False
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return True

    def gives_back(self, size: int) -> None:
        self.bytes -= size

    def empty(
        self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, *, pin: bool
    ) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if pin and not self.takes(size):
            raise RuntimeError(REFUSAL)
        found = torch.empty(shape, dtype=dtype)
        if strides is not None:
            found = torch.empty_strided(shape, strides, dtype=dtype)
        if pin:
            weakref.finalize(found, self.gives_back, size).atexit = False
        return found

    def register(self, address: int, size: int) -> int:
        if not self.takes(size):
            return OUT_OF_MEMORY
        self.in_place.append(size)
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> None:
        self.gives_back(self.registered.pop(address))

    def clear(self, device: torch.device) -> None:
        self.cleared += 1


def pinning_driver(
    monkeypatch: pytest.MonkeyPatch, *, most_bytes: float = float("inf")
) -> PinningDriver:
    """Let all devices be copied to from memory that such a driver pins; the process's count begins at 0.

    What a test leaves pinned is counted for that test only: the count of the process comes back after it.
    """
    driver = PinningDriver(most_bytes=most_bytes)
    monkeypatch.setattr(pinned_memory, "_count", pinned_memory.PinnedMemory())
    monkeypatch.setattr(pinned_memory, "pins_for", lambda device, in_place=False: True)
    monkeypatch.setattr(pinned_memory, "_empty", driver.empty)
    monkeypatch.setattr(pinned_memory, "register_host", driver.register)
    monkeypatch.setattr(pinned_memory, "unregister_host", driver.unregister)
    monkeypatch.setattr(pinned_memory, "_clear_last_error", driver.clear)
    return driver


def stream_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks be streamed where there is no GPU."""
    monkeypatch.setattr(
        MemoryChooser, "_streamable", property(lambda self: len(self.inputs.costs.blocks))
    )
    monkeypatch.setattr(plan, "unmet_needs", lambda config, **machine: ())
