"""Bytes of what is trained: optimizer states and where they lie, copies for saving. No torch.

Input is the shapes of the adapter's tensors (shape -> how many), as libraries treat small tensors
otherwise than large ones, and some optimizers matrices otherwise than vectors; output is bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lora_trainer.pinned_sizes import pinned_bytes
from lora_trainer.planning.adapter_size import Shape

MASTER_BYTES = GRADIENT_BYTES = 4
EIGHT_BIT_MOMENTS: Mapping[str, int] = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1}
MOMENTS: Mapping[str, int] = {"adamw": 2, "lion": 1, "schedulefree_adamw": 2, "prodigy": 4}
"""fp32 tensors as large as what is trained. One of Prodigy's is its start, which takes nothing where
that is zero, as `up` of a new LoRA is: it is counted all the same."""
PAGED = frozenset({"paged_adamw8bit"})
"""Optimizers whose state the driver moves to host memory while the card is full."""
# bitsandbytes (0.49 and 0.50, optim/optimizer.py): states of fewer elements stay in fp32; one fp32 scale for
# every block of the others; of a paged optimizer's, tensors of fewer elements and all scales stay
# on the card.
EIGHT_BIT_ELEMENTS = 4096
SCALED_ELEMENTS = 256
PAGED_ELEMENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Optimizer states by where they lie: always on the device, or where the driver moves them."""

    on_device: int
    paged: int

    @property
    def total(self) -> int:
        return self.on_device + self.paged


def state_bytes(tensors: Mapping[Shape, int], optimizer: str) -> StateBytes:
    """Return what the states of an optimizer take; `tensors` is shape -> how many."""
    on_device = paged = 0
    for shape, count in tensors.items():
        for size, is_paged in _states(shape, optimizer):
            on_device += 0 if is_paged else count * size
            paged += count * size if is_paged else 0
    return StateBytes(on_device=on_device, paged=paged)


def copied_bytes(
    tensors: Mapping[Shape, int], optimizer: str, *, pissa: bool, pinned: bool, copies: int = 0
) -> int:
    """Return the host memory that saving keeps: of masters, of optimizer states, and for the export.

    Torch rounds each `pinned` tensor up to a power of two, at least a page. What is paged is no
    device memory to it, so its copies are not pinned. PiSSA's start is saved too, and exported;
    `copies` of the masters, a running average and the best weights, are saved.
    """
    kept = 1 + pissa + copies
    sizes = [
        (count, size, pinned and not is_paged)
        for shape, count in tensors.items()
        for size, is_paged in (
            *((MASTER_BYTES * math.prod(shape), False),) * kept,
            *_states(shape, optimizer),
            (MASTER_BYTES * math.prod(shape) * (2 if pissa else 1), False),
        )
    ]
    return sum(count * (pinned_bytes(size) if rounded else size) for count, size, rounded in sizes)


def _states(shape: Shape, optimizer: str) -> tuple[tuple[int, bool], ...]:
    """Return (bytes, whether paged) of each state of one tensor."""
    elements = math.prod(shape)
    if optimizer in EIGHT_BIT_MOMENTS:
        moments = EIGHT_BIT_MOMENTS[optimizer]
        if elements < EIGHT_BIT_ELEMENTS:
            return ((4 * elements, False),) * moments
        scales = 4 * -(-elements // SCALED_ELEMENTS)
        is_paged = optimizer in PAGED and elements >= PAGED_ELEMENTS
        return ((elements, is_paged), (scales, False)) * moments
    return tuple((4 * size, False) for size in _state_elements(shape, optimizer))


def _state_elements(shape: Shape, optimizer: str) -> tuple[int, ...]:
    """Return the elements of each fp32 state of one tensor."""
    elements = math.prod(shape)
    match optimizer:
        case "adafactor":
            return _second_moment(shape)
        case "came":  # of updates and of their instability; of a vector the latter is not used
            return (elements, *_second_moment(shape) * (1 if len(shape) < 2 else 2))
        case "muon":  # AdamW for what is no matrix
            return (elements,) * (1 if len(shape) == 2 else MOMENTS["adamw"])
    return (elements,) * MOMENTS[optimizer]


def _second_moment(shape: Shape) -> tuple[int, ...]:
    """Return the elements of its factors over the last two dimensions; a vector's is whole."""
    if len(shape) < 2:
        return shape
    *others, rows, columns = shape
    return (math.prod(others) * rows, math.prod(others) * columns)
