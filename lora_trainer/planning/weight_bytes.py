"""Bytes of weights: those of the frozen base, and those of the adapter.

How much memory the frozen base takes, unquantised or quantised, on the GPU or streamed. Torch-free.

Input is the base's parameter count and the shapes of the linear layers in its repeated blocks; output
bytes. `quantization.weight_bytes` counts a layer as `network/quantize.py` stores it.

Bytes of optimizer states, by where they lie, and of the host copies for saving. No torch.

Input is the number of trained tensors by shape, because libraries treat small tensors differently from
large ones, and some optimizers matrices differently from vectors; output is bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lora_trainer.config.choices import (
    QUANTIZATIONS,
    BasePrecision,
    moved_bytes,
    saved_bytes,
    weight_bytes,
)
from lora_trainer.config.declare import Precision
from lora_trainer.hardware.devices import pinned_bytes
from lora_trainer.lora.adapter_size import Shape

ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class FrozenBase:
    """The weights of a base: `shapes` are (fan_in, out) of the linear layers in its repeated blocks.

    If `kept_as` is a quantisation, these layers are quantised, except layers with a part of their name
    in `quantization_skip`; everything else (embeddings, norms, biases, convolutions) stays in `dtype`.
    `block_pattern` matches the block's name at the beginning of a layer's name.
    """

    parameters: int
    shapes: Mapping[str, tuple[int, int]]
    quantization_skip: tuple[str, ...]
    block_pattern: str
    dtype: Precision
    kept_as: BasePrecision

    @property
    def is_quantized(self) -> bool:
        return self.kept_as in QUANTIZATIONS

    @cached_property
    def linear_bytes(self) -> int:
        """Bytes of the layers of `shapes`, with their scales."""
        return sum(self.layer_bytes.values())

    @cached_property
    def layer_bytes(self) -> Mapping[str, int]:
        """Bytes of each layer of `shapes` as it is kept."""
        return {
            name: weight_bytes(fan_in=fan_in, out=out, precision=self._precision(name))
            for name, (fan_in, out) in self.shapes.items()
        }

    def _precision(self, name: str) -> BasePrecision:
        # Whole parts of the name: `norm` skips `norm.linear`, not `normal_attention`.
        return self.dtype if set(name.split(".")) & set(self.quantization_skip) else self.kept_as

    @cached_property
    def linear_elements(self) -> int:
        """Weights in the layers of `shapes`, counted."""
        return sum(fan_in * out for fan_in, out in self.shapes.values())

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights outside `shapes`, which are never quantised."""
        return (self.parameters - self.linear_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole base."""
        return self.linear_bytes + self.other_bytes

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the largest layer when dequantised; one layer is at a time. 0: the base is unquantised."""
        if not self.is_quantized:
            return 0
        # Layers are dequantised where they are multiplied and freed at once, so only the largest counts.
        largest = max((fan_in * out for fan_in, out in self.shapes.values()), default=0)
        return largest * ELEMENT_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each repeated block that can be streamed, in module order, without biases and norms."""
        blocks: dict[str, int] = {}
        pattern = re.compile(self.block_pattern)
        for name, size in self.layer_bytes.items():
            if match := pattern.match(name):
                blocks[match[0]] = blocks.get(match[0], 0) + size
        return tuple(blocks.values())

    def streamed_bytes(self, count: int) -> int:
        """Return the bytes that `count` streamed blocks take in host memory, and that each pass copies."""
        return moved_bytes(self.block_bytes, count) if count else 0

    def buffer_bytes(self, count: int) -> int:
        """Return the bytes of the device buffers through which `count` streamed blocks pass."""
        return self.streamed_bytes(count) - saved_bytes(self.block_bytes, count)


MASTER_BYTES = GRADIENT_BYTES = 4
EIGHT_BIT_MOMENTS: Mapping[str, int] = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1}
MOMENTS: Mapping[str, int] = {"adamw": 2, "lion": 1, "schedulefree_adamw": 2, "prodigy": 4}
"""State tensors in fp32 for each trained tensor, of the same size. One of Prodigy's is the initial weights;
it takes no memory where they are zero, as `up` of a new LoRA is, but is counted all the same."""
PAGED = frozenset({"paged_adamw8bit"})
"""Optimizers whose states the driver moves to host memory while the GPU is full."""
# bitsandbytes (0.49 and 0.50, optim/optimizer.py): states of tensors with fewer than EIGHT_BIT_ELEMENTS stay
# in fp32; 8-bit states have an fp32 scale for each SCALED_ELEMENTS elements; a paged optimizer keeps
# its scales and the states of tensors with fewer than PAGED_ELEMENTS on the GPU.
EIGHT_BIT_ELEMENTS = 4096
SCALED_ELEMENTS = 256
PAGED_ELEMENTS = 100_000


def state_bytes(tensors: Mapping[Shape, int], optimizer: str) -> tuple[int, int]:
    """Return the bytes of an optimizer's states that stay on the device, and those the driver may page out.

    `tensors` is the number of trained tensors by shape.
    """
    on_device = paged = 0
    for shape, count in tensors.items():
        for size, is_paged in _states(shape, optimizer):
            on_device += 0 if is_paged else count * size
            paged += count * size if is_paged else 0
    return on_device, paged


def copied_bytes(
    tensors: Mapping[Shape, int], optimizer: str, *, pinned: bool, copies: int = 0
) -> int:
    """Return the bytes of the host copies for saving: fp32 masters, optimizer states, and the export.

    Torch rounds each `pinned` tensor up to a power of two, at least a page. Paged states are no device
    memory for torch, so their copies are not pinned. `copies` counts
    further sets of the masters' size (a running average, the best weights).
    """
    kept_copies = 1 + copies  # one of the masters in any case
    sizes = [
        (count, size, pinned and not is_paged)
        for shape, count in tensors.items()
        for size, is_paged in (
            *((MASTER_BYTES * math.prod(shape), False),) * kept_copies,
            *_states(shape, optimizer),
            (MASTER_BYTES * math.prod(shape), False),
        )
    ]
    return sum(count * (pinned_bytes(size) if rounded else size) for count, size, rounded in sizes)


def _states(shape: Shape, optimizer: str) -> tuple[tuple[int, bool], ...]:
    """Return (bytes, is paged) for each state of one tensor."""
    elements = math.prod(shape)
    if optimizer in EIGHT_BIT_MOMENTS:
        moments = EIGHT_BIT_MOMENTS[optimizer]
        if elements < EIGHT_BIT_ELEMENTS:
            return ((4 * elements, False),) * moments
        scales = 4 * -(
            -elements // SCALED_ELEMENTS
        )  # rounded up: a last, shorter group has a scale too
        is_paged = optimizer in PAGED and elements >= PAGED_ELEMENTS
        return ((elements, is_paged), (scales, False)) * moments
    return tuple((4 * size, False) for size in _state_elements(shape, optimizer))


def _state_elements(shape: Shape, optimizer: str) -> tuple[int, ...]:
    """Return the elements of each fp32 state of one tensor."""
    elements = math.prod(shape)
    match optimizer:
        case "adafactor":
            return _second_moment(shape)
        case "came":  # second moments of the updates and, for matrices only, of their instability
            return (elements, *_second_moment(shape) * (1 if len(shape) < 2 else 2))
        case "muon":  # tensors that are no matrices are trained by AdamW
            return (elements,) * (1 if len(shape) == 2 else MOMENTS["adamw"])
    return (elements,) * MOMENTS[optimizer]


def _second_moment(shape: Shape) -> tuple[int, ...]:
    """Return the elements of a factored second moment: rows and columns; a vector's is not factored."""
    if len(shape) < 2:
        return shape
    # As in Adafactor's code: the last two dimensions are factored, a convolution's others are kept.
    *others, rows, columns = shape
    return (math.prod(others) * rows, math.prod(others) * columns)
