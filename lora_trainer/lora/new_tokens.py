"""New tokens of text encoders: trained embedding vectors beside a frozen table (pivotal tuning).

Gal et al. 2022 (arXiv 2208.01618) learn the vectors of a word; Roich et al. 2021 (arXiv 2106.05744) first
find such a pivot and then tune the generator around it. Input is a `TextEncoder` that has the new word;
output are the vectors by component, float32 whatever the dtype of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.families.base import TextEncoder


class ExtendedTable(nn.Module):
    """Replaces a network's token table; token numbers -1, -2, ... are rows 0, 1, ... of `vectors`."""

    def __init__(self, base_table: nn.Embedding, vectors: nn.Parameter) -> None:
        super().__init__()
        self.known, self.vectors = base_table, vectors

    def forward(self, numbers: Tensor) -> Tensor:
        """Return [..., width] in the dtype of the base's table for token numbers [...]."""
        # Both lookups run for all positions, with indices clamped into range, and `where` chooses: masks
        # of varying size would make the host wait for the device.
        base_rows: Tensor = self.known(numbers.clamp(min=0))
        new = functional.embedding((-1 - numbers).clamp(min=0), self.vectors)
        return torch.where((numbers < 0).unsqueeze(-1), new.to(base_rows.dtype), base_rows)


def add_new_tokens(
    text: TextEncoder, count: int, *, start: str | None, seed: int
) -> dict[str, nn.Parameter]:
    """Extend the tables of `text` by `count` vectors of its new word; return them, [count, width] each.

    They start at the vectors of the word `start`, repeated in turn, or at random vectors with the table's
    standard deviation. Raises RequestError for a `start` without tokens.
    """
    numbers = {} if start is None else text.numbers(start)
    vectors = {}
    for component, network in text.networks.items():
        base_table = network.get_input_embeddings()  # type: ignore[operator]  # transformers' own
        assert isinstance(base_table, nn.Embedding)
        if start is None:
            values = _random(base_table.weight, count, component=component, seed=seed)
        else:
            values = _copied(base_table.weight, numbers[component], count, start=start)
        vectors[component] = nn.Parameter(values)
        table = ExtendedTable(base_table, vectors[component])
        network.set_input_embeddings(table)  # type: ignore[operator]  # transformers' own
    return vectors


def _random(table: Tensor, count: int, *, component: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw_seed(seed, Stream.NEW_TOKENS, component))
    drawn = torch.randn(count, table.shape[1], generator=generator)
    return drawn.to(table.device) * table.float().std()


def _copied(table: Tensor, numbers: Sequence[int], count: int, *, start: str) -> Tensor:
    if not numbers:
        raise RequestError(
            f"adapter.new_tokens_from={start!r} has no tokens", fix="use a word such as person"
        )
    chosen = [numbers[index % len(numbers)] for index in range(count)]
    return table[torch.tensor(chosen, device=table.device)].float().clone()
