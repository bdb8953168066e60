"""How much memory the frozen base takes, kept whole or in few bits, on the card or streamed. Torch-free.

Input is the base's parameter count and the shapes of the linear layers in its repeated blocks; output
bytes. `quantization.weight_bytes` counts a layer as `model/quantize.py` stores it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lora_trainer.config import Precision
from lora_trainer.quantization import QUANTIZATIONS, BasePrecision, weight_bytes
from lora_trainer.streamed import BUFFERS, moved_bytes, saved_bytes

ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
VECTORS_SHARE = 16
"""What layers that are away give is made for as many samples as take this part of the layers' bytes."""


@dataclass(frozen=True, kw_only=True)
class FrozenBase:
    """The weights of a base: `shapes` are (fan_in, out) of the linear layers in its repeated blocks.

    With `kept_as` of few bits these are quantised, but those with a part of their name in
    `unquantised`; everything else (embeddings, norms, biases, convolutions) stays in `dtype`.
    `block_pattern` matches the beginning of a layer's name that is the name of its block. The layers
    `away` lie in host memory, and only what they give for samples to come is on the device.
    """

    parameters: int
    shapes: Mapping[str, tuple[int, int]]
    unquantised: tuple[str, ...]
    block_pattern: str
    dtype: Precision
    kept_as: BasePrecision
    away: tuple[str, ...] = ()

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
        return self.dtype if set(name.split(".")) & set(self.unquantised) else self.kept_as

    @cached_property
    def linear_elements(self) -> int:
        """Numbers in the layers of `shapes`."""
        return sum(fan_in * out for fan_in, out in self.shapes.values())

    @cached_property
    def away_bytes(self) -> int:
        """Bytes of the layers that are away."""
        return sum(self.layer_bytes[name] for name in self.away)

    @cached_property
    def away_elements(self) -> int:
        """Numbers in the layers that are away."""
        return sum(math.prod(self.shapes[name]) for name in self.away)

    @property
    def away_buffer_bytes(self) -> int:
        """Bytes of the buffers through which they come."""
        largest = max((self.layer_bytes[name] for name in self.away), default=0)
        return min(BUFFERS, len(self.away)) * largest

    @cached_property
    def vector_bytes(self) -> int:
        """Bytes of what they give for one sample."""
        return sum(self.shapes[name][1] for name in self.away) * ELEMENT_BYTES[self.dtype]

    @property
    def samples_ahead(self) -> int:
        """For how many samples that is made at once; 0: nothing is away."""
        if not self.away:
            return 0
        return max(1, self.away_bytes // (VECTORS_SHARE * self.vector_bytes))

    @property
    def other_bytes(self) -> int:
        """Bytes of what is never kept in few bits."""
        return (self.parameters - self.linear_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole base."""
        return self.linear_bytes + self.other_bytes

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the largest layer made whole again, which happens one layer at a time; 0: nothing to make."""
        if not self.is_quantized:
            return 0
        largest = max((fan_in * out for fan_in, out in self.shapes.values()), default=0)
        return largest * ELEMENT_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each repeated block that can be streamed, in module order, but for biases and norms."""
        blocks: dict[str, int] = {}
        pattern = re.compile(self.block_pattern)
        away = set(self.away)
        for name, size in self.layer_bytes.items():
            if name not in away and (found := pattern.match(name)):
                blocks[found[0]] = blocks.get(found[0], 0) + size
        return tuple(blocks.values())

    def streamed_bytes(self, count: int) -> int:
        """Return what `count` streamed blocks take in host memory, and what a pass copies."""
        return moved_bytes(self.block_bytes, count) if count else 0

    def buffer_bytes(self, count: int) -> int:
        """Return what the buffers of `count` streamed blocks take on the device."""
        return self.streamed_bytes(count) - saved_bytes(self.block_bytes, count)
