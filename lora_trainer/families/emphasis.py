"""Prompt weights on CLIP's hidden states, as Stable Diffusion web UI and kohya's trainers apply them.

Inputs: the weighted parts of a prompt, a tokenizer, an encoder's hidden states h. Outputs: a weight w_i per
token i, and the states w_i h_i * mean(h) / mean(w h), with means over tokens and channels of one chunk:
weighted words grow relative to the rest while the mean stays the same. The ratio is left out where a mean
is near zero or the means differ in sign, because it would then explode or flip the states. Pooled outputs
have no tokens and stay unchanged. Torch-free to import.
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
"""Fraction of the root mean square below which a mean counts as zero: the final layer norm leaves means
close to zero, and a ratio of two such means says nothing about strength."""


def token_weights(
    parts: Sequence[Weighted],
    tokenizer: CLIPTokenizer,
    *,
    chunks: Chunks,
    word: NewWord | None = None,
) -> Tensor:
    """Return the weight of each token, float32 [1, tokens of all chunks]; special tokens weigh 1.

    A token has the weight of its last letter. `word` is a new word that is read as new tokens.
    """
    import torch

    text, letters = words_of(parts), list(_by_letter(parts))
    weights: list[float] = []
    first = 0
    for number, piece in enumerate([text] if word is None else word.split(text)):
        if word is not None and number > 0:
            weights += [letters[first]] * word.tokens
            first += len(word.text)
        # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
        ends = tokenizer(
            piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        weights += [letters[first + end - 1] for _, end in ends]
        first += len(piece)
    return torch.tensor([chunks.row(weights, begin=1.0, end=1.0, padding=1.0)])


def emphasised(hidden: Tensor, weights: Tensor | None) -> Tensor:
    """Apply weights [B, tokens] to hidden states [B, tokens, width]; None returns the states unchanged."""
    import torch

    if weights is None:
        return hidden
    states = hidden.float()
    weighted = states * weights.to(states.device, states.dtype).unsqueeze(-1)
    before, after = (values.mean(dim=(1, 2), keepdim=True) for values in (states, weighted))
    strength = states.square().mean(dim=(1, 2), keepdim=True).sqrt()
    both = torch.minimum(before * before.sign(), after * before.sign())
    has_mean, one = both > NEGLIGIBLE * strength, torch.ones_like(after)
    # Choose before dividing: torch.where passes gradients through both branches, and 0 * (1 / 0) is NaN.
    scale = torch.where(has_mean, before, one) / torch.where(has_mean, after, one)
    return (weighted * scale).to(hidden.dtype)


def _by_letter(parts: Iterable[Weighted]) -> Iterable[float]:
    for words, weight in parts:
        yield from [weight] * len(words)
