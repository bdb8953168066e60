"""Long prompts for encoders with a short limit: a prompt is split into chunks, encoded, and joined again.

Inputs: a prompt's tokens without begin and end, or the hidden states of its chunks. Outputs: chunks of
tokens with a begin and an end each, and joined hidden states with the first begin and the last end only:
77, 152 or 227 tokens for 1, 2 or 3 chunks of CLIP, as in kohya's trainers (`max_token_length` 75, 150,
225) and diffusers' community pipelines. Web user interfaces keep every begin and end. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
AROUND = 2
"""Tokens around each chunk: its begin and its end."""


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """`count` chunks of `width` tokens, begin and end included; a longer prompt is truncated."""

    count: int
    width: int

    @property
    def room(self) -> int:
        """Largest number of prompt tokens that all chunks hold, begin and end excluded."""
        return self.count * (self.width - AROUND)

    def row(
        self, values: Sequence[Value], *, begin: Value, end: Value, padding: Value
    ) -> list[Value]:
        """Return the `count` * `width` values of a prompt's tokens laid out in chunks.

        `values` has one entry per prompt token. A chunk behind the prompt's end equals the chunk of an
        empty prompt.
        """
        room, row = self.width - AROUND, list[Value]()
        # All chunks, also those behind the prompt's end: the rows of a batch have one length.
        for first in range(0, self.room, room):
            part = values[first : min(first + room, self.room)]
            row += [begin, *part, end, *[padding] * (room - len(part))]
        return row

    def apart(self, tokens: Tensor) -> Tensor:
        """Split tokens [B, count * width] into the encoder's rows [B * count, width]."""
        return tokens.reshape(-1, self.width)

    def joined(self, states: Tensor) -> Tensor:
        """Join hidden states [B * count, width, C] to those of whole prompts, [B, room + 2, C]."""
        import torch

        if self.count == 1:
            return states
        texts = states.unflatten(0, (-1, self.count))
        # texts: [B, count, width, C]; leave out the begin and the end of every chunk.
        inner = texts[:, :, 1:-1].flatten(1, 2)
        return torch.cat([texts[:, 0, :1], inner, texts[:, -1, -1:]], dim=1)
