"""Long texts for encoders that read few tokens: pieces of a text encoded one by one, joined again.

Inputs: a text's tokens without begin and end, or the hidden states of its chunks. Outputs: tokens in
chunks that each have their own begin and end, and hidden states in which only the first begin and the
last end are left: 77, 152 or 227 tokens for 1, 2 or 3 chunks of CLIP, as kohya's trainers have it
(`max_token_length` 75, 150, 225). Web user interfaces draw with every begin and end left in; diffusers'
community pipelines join as this does. Importing this needs no torch.
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
    """`count` chunks of `width` tokens, begin and end among them; a text is cut where they end."""

    count: int
    width: int

    @property
    def room(self) -> int:
        """Tokens of a text that are read."""
        return self.count * (self.width - AROUND)

    def row(
        self, values: Sequence[Value], *, begin: Value, end: Value, padding: Value
    ) -> list[Value]:
        """Return the values of a text's tokens in all chunks, `count` * `width` of them.

        A chunk without any of the text is that of the empty text.
        """
        room, found = self.width - AROUND, list[Value]()
        for first in range(0, self.room, room):
            part = values[first : min(first + room, self.room)]
            found += [begin, *part, end, *[padding] * (room - len(part))]
        return found

    def apart(self, tokens: Tensor) -> Tensor:
        """Return [B, count * width] as the rows that are encoded, [B * count, width]."""
        return tokens.reshape(-1, self.width)

    def joined(self, states: Tensor) -> Tensor:
        """Return hidden states [B * count, width, C] as those of whole texts, [B, room + 2, C]."""
        import torch

        if self.count == 1:
            return states
        texts = states.unflatten(0, (-1, self.count))
        inner = texts[:, :, 1:-1].flatten(1, 2)
        return torch.cat([texts[:, 0, :1], inner, texts[:, -1, -1:]], dim=1)
