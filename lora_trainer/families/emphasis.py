"""Weights of words in CLIP's outputs, as Stable Diffusion web UI and kohya's trainers apply them.

Inputs: the weighted parts of a text, a tokenizer, an encoder's hidden states. Outputs: a weight for each
token, and hidden states in which token i is multiplied by its weight w_i and all of them by mean(h) /
mean(w h), over tokens and channels of one chunk: what is stressed grows, the whole stays as strong as
it was. Means that are next to nothing or of opposite signs say nothing of strength, and restore
nothing. Pooled outputs have no tokens and stay as they are. Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lora_trainer.caption_markup import Weighted, words_of
from lora_trainer.families.base import NewWord
from lora_trainer.families.chunks import Chunks

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import CLIPTokenizer


NEGLIGIBLE = 0.02
"""Share of the root mean square below which a mean is little more than what a layer norm left of it."""


def token_weights(
    parts: Sequence[Weighted],
    tokenizer: CLIPTokenizer,
    *,
    chunks: Chunks,
    word: NewWord | None = None,
) -> Tensor:
    """Return float32 [1, tokens of all chunks]: each token's weight, that of its last letter; 1 around the text.

    `word` is what is read as tokens of its own.
    """
    import torch

    text, letters = words_of(parts), list(_by_letter(parts))
    found: list[float] = []
    first = 0
    for number, piece in enumerate([text] if word is None else word.split(text)):
        if word is not None and number > 0:
            found += [letters[first]] * word.tokens
            first += len(word.text)
        # Not verbose: what is cut is said in our own words.
        places = tokenizer(
            piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        found += [letters[first + end - 1] for _, end in places]
        first += len(piece)
    return torch.tensor([chunks.row(found, begin=1.0, end=1.0, padding=1.0)])


def emphasised(hidden: Tensor, weights: Tensor | None) -> Tensor:
    """Return hidden states [B, tokens, width] with weights [B, tokens] applied; None: as they are."""
    import torch

    if weights is None:
        return hidden
    states = hidden.float()
    weighted = states * weights.to(states.device, states.dtype).unsqueeze(-1)
    before, after = (found.mean(dim=(1, 2), keepdim=True) for found in (states, weighted))
    strength = states.square().mean(dim=(1, 2), keepdim=True).sqrt()
    both = torch.minimum(before * before.sign(), after * before.sign())
    counts, one = both > NEGLIGIBLE * strength, torch.ones_like(after)
    # Chosen before they are divided: what is not chosen would still have gradients, of 1 / 0.
    scale = torch.where(counts, before, one) / torch.where(counts, after, one)
    return (weighted * scale).to(hidden.dtype)


def _by_letter(parts: Iterable[Weighted]) -> Iterable[float]:
    for words, weight in parts:
        yield from [weight] * len(words)
