"""Bytes of what is trained: optimizer states and where they lie, copies for saving. No torch.

Input is the sizes of the adapter's tensors (elements -> how many), as libraries treat small tensors
otherwise than large ones; output is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MASTER_BYTES = GRADIENT_BYTES = 4
MOMENTS = 2
PAGED = frozenset({"paged_adamw8bit"})
"""Optimizers whose state the driver moves to host memory while the card is full."""
# bitsandbytes (0.49 and 0.50, optim/optimizer.py): states of fewer elements stay in fp32; one fp32 scale for
# every block of the others; of a paged optimizer's, tensors of fewer elements and all scales stay
# on the card.
EIGHT_BIT_ELEMENTS = 4096
SCALED_ELEMENTS = 256
PAGED_ELEMENTS = 100_000
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Optimizer states by where they lie: always on the device, or where the driver moves them."""

    on_device: int
    paged: int

    @property
    def total(self) -> int:
        return self.on_device + self.paged


def state_bytes(tensors: Mapping[int, int], optimizer: str) -> StateBytes:
    """Return what the states of an optimizer take; `tensors` is elements -> how many."""
    on_device = paged = 0
    for elements, count in tensors.items():
        for size, is_paged in _states(elements, optimizer):
            on_device += 0 if is_paged else count * size
            paged += count * size if is_paged else 0
    return StateBytes(on_device=on_device, paged=paged)


def copied_bytes(
    tensors: Mapping[int, int], optimizer: str, *, pissa: bool, pinned: bool, copies: int = 0
) -> int:
    """Return the host memory that saving keeps: of masters, of optimizer states, and for the export.

    Torch rounds each `pinned` tensor up to a power of two, at least a page. What is paged is no
    device memory to it, so its copies are not pinned. PiSSA's start is saved too, and exported;
    `copies` of the masters, a running average and the best weights, are saved.
    """
    kept = 1 + pissa + copies
    sizes = [
        (count, size, pinned and not is_paged)
        for elements, count in tensors.items()
        for size, is_paged in (
            *((MASTER_BYTES * elements, False),) * kept,
            *_states(elements, optimizer),
            (MASTER_BYTES * elements * (2 if pissa else 1), False),
        )
    ]
    return sum(count * (pinned_bytes(size) if rounded else size) for count, size, rounded in sizes)


def pinned_bytes(size: int) -> int:
    """Return what torch takes for pinned memory of `size` bytes: the next power of two."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())


def _states(elements: int, optimizer: str) -> tuple[tuple[int, bool], ...]:
    """Return (bytes, whether paged) of each state of one tensor."""
    if optimizer == "adamw" or elements < EIGHT_BIT_ELEMENTS:
        return ((4 * elements, False),) * MOMENTS
    scales = 4 * -(-elements // SCALED_ELEMENTS)
    is_paged = optimizer in PAGED and elements >= PAGED_ELEMENTS
    return ((elements, is_paged), (scales, False)) * MOMENTS
