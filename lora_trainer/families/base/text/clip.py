"""CLIP text encoders: tokenizing, embedding with gradients, prompt weights.

Output is `text`, the hidden states that the U-Net attends to; a pair of encoders also returns `pooled`.

Prompt weights act on the hidden states h as in Stable Diffusion web UI and kohya's trainers: a token i of
weight w_i gets w_i h_i * mean(h) / mean(w h), with means over tokens and channels of one chunk, so weighted
words grow relative to the rest while the mean stays the same. The ratio is left out where a mean is near
zero or the means differ in sign, because it would then explode or flip the states. Pooled outputs have no
tokens and stay unchanged.

A long prompt is split into chunks with a begin and an end each; of the joined hidden states the first begin
and the last end are kept: 77, 152 or 227 tokens for 1, 2 or 3 chunks, as in kohya's trainers
(`max_token_length` 75, 150, 225) and diffusers' community pipelines. Web user interfaces keep every begin
and end. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lora_trainer.common.caption_markup import NewWord, Weighted, words_of
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.releases import text_layers, text_network
from lora_trainer.families.base.texts import WEIGHTS, TextEncoder, TextInputs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import CLIPTokenizer

Value = TypeVar("Value")
# Fraction of the root mean square below which a mean counts as zero: the final layer norm leaves means close to
# zero, and a ratio of two such means says nothing about strength.
NEGLIGIBLE = 0.02


def emphasised(hidden: Tensor, weights: Tensor) -> Tensor:
    """Apply weights [B, tokens] to hidden states [B, tokens, width]."""
    import torch

    states = hidden.float()
    weighted = states * weights.to(states.device, states.dtype).unsqueeze(-1)
    before, after = (values.mean(dim=(1, 2), keepdim=True) for values in (states, weighted))
    strength = states.square().mean(dim=(1, 2), keepdim=True).sqrt()
    # Times the sign of `before` both means are positive where they agree in sign; the
    # smaller one then shows whether either is near zero.
    both = torch.minimum(before * before.sign(), after * before.sign())
    has_mean, one = both > NEGLIGIBLE * strength, torch.ones_like(after)
    # Choose before dividing: torch.where passes gradients through both branches, and 0 * (1 / 0) is NaN.
    scale = torch.where(has_mean, before, one) / torch.where(has_mean, after, one)
    return (weighted * scale).to(hidden.dtype)


# Layers of the largest CLIP text encoder in use, OpenCLIP's bigG.
MAX_LAYERS = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "mlp.fc1", "mlp.fc2")


def clip_encoders(
    encoder: type[ClipEncoder], checkpoint: Mapping[str, str], *, penultimate: bool = False
) -> TextInputs:
    """Return CLIP encoders in the order of the pipeline; `checkpoint` has by role the prefix of the weights in files.

    Layers go up to the largest encoder's number, because miniature bases have other numbers.
    """
    networks = {
        f"text_encoder_{number}" if number > 1 else "text_encoder": replace(
            text_network(role),
            layers=text_layers(
                "clip",
                layers=MAX_LAYERS,
                width=text_network(role).width,
                inner=text_network(role).sizes["inner"],
            ),
        )
        for number, role in enumerate(checkpoint, start=1)
    }
    return TextInputs(
        networks=networks,
        prefixes=dict(zip(networks, checkpoint.values(), strict=True)),
        encoder=encoder,
        width="cross_attention_dim",
        penultimate=penultimate,
        trainable=True,
        prompt_weights=True,
        chunks=True,
        new_token_keys={
            component: network.role if len(networks) > 1 else "emb_params"
            for component, network in networks.items()
        },
    )


@dataclass(kw_only=True, eq=False)
class ClipEncoder(TextEncoder):
    """CLIP encoders and their tokenizers; the U-Net reads the last hidden state."""

    reading = ""  # as in the entries of releases before readings had names
    word: NewWord | None = None

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return int64 [B, tokens of all chunks] by component."""
        import torch

        tokens = {}
        for component, tokenizer in self.tokenizers.items():
            begin, *_, end = tokenizer("").input_ids  # an empty prompt has special tokens only
            rows = [
                self._row(
                    [number for number, _ in self._read([(prompt, 1.0)], tokenizer)],
                    begin=begin,
                    end=end,
                    # The end token for CLIP-L, "!" (0) for OpenCLIP. The network sees the padding: CLIP
                    # gets no mask, in training as in diffusers' pipelines.
                    padding=tokenizer.pad_token_id,
                )
                for prompt in prompts
            ]
            tokens[component] = torch.tensor(rows)
        return tokens

    def learn(self, word: NewWord) -> None:
        self.word = word

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        return {
            component: list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            for component, tokenizer in self.tokenizers.items()
        }

    def _row(
        self, values: Sequence[Value], *, begin: Value, end: Value, padding: Value
    ) -> list[Value]:
        """Return the values of a prompt's tokens laid out in chunks of `max_tokens`, begin and end included.

        `values` has one entry per prompt token. A chunk behind the prompt's end equals the chunk of an
        empty prompt.
        """
        room, row = self.facts.chunk_room, list[Value]()
        # All chunks, also those behind the prompt's end: the rows of a batch have one length.
        for first in range(0, self.prompt_room(), room):
            part = values[first : min(first + room, self.prompt_room())]
            row += [begin, *part, end, *[padding] * (room - len(part))]
        return row

    def _read(self, parts: Sequence[Weighted], tokenizer: CLIPTokenizer) -> list[tuple[int, float]]:
        """Return number and weight of each token; a token has the weight of its last letter."""
        text, letters = words_of(parts), [weight for words, weight in parts for _ in words]
        tokens, first = list[tuple[int, float]](), 0
        pieces = [(0, len(text))] if self.word is None else self.word.pieces(text)
        for index, (start, end_of_piece) in enumerate(pieces):
            if self.word is not None and index > 0:
                tokens += [(number, letters[first]) for number in self.word.numbers]
            first, piece = start, text[start:end_of_piece]
            # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
            read = tokenizer(
                piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            for number, (_, end) in zip(read.input_ids, read["offset_mapping"], strict=True):
                tokens.append((number, letters[first + end - 1]))
            first = end_of_piece
        return tokens

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        import torch

        tokens = dict(self.tokenize([words_of(parts)]))
        for component, tokenizer in self.tokenizers.items():
            weights = [weight for _, weight in self._read(parts, tokenizer)]
            row = self._row(weights, begin=1.0, end=1.0, padding=1.0)  # special tokens weigh 1
            tokens[component + WEIGHTS] = torch.tensor([row])
        return tokens

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, width]: the states after the final norm, for Stable Diffusion 1 and 2."""
        ((component, network),) = self.networks.items()
        return {"text": self._text(tokens, component, self._outputs(tokens, component)[0])}

    def _outputs(self, tokens: Mapping[str, Tensor], component: str, **options: Any) -> Any:
        """Run one network on all chunks of all texts at once."""
        return self.run(
            component, tokens[component].reshape(-1, self.facts.release.max_tokens), **options
        )

    def _text(self, tokens: Mapping[str, Tensor], component: str, states: Tensor) -> Tensor:
        """Apply prompt weights to the hidden states [B * chunks, max_tokens, width]; join the chunks of a prompt."""
        import torch

        weights, count = tokens.get(component + WEIGHTS), self.facts.chunks
        if weights is not None:
            states = emphasised(states, weights.reshape(-1, self.facts.release.max_tokens))
        if count == 1:
            return states
        texts = states.unflatten(0, (-1, count))
        # texts: [B, chunks, max_tokens, width]; leave out the begin and the end of every chunk.
        inner = texts[:, :, 1:-1].flatten(1, 2)
        return torch.cat([texts[:, 0, :1], inner, texts[:, -1, -1:]], dim=1)

    def count_tokens(self, prompt: str) -> int:
        return len(self._read([(prompt, 1.0)], next(iter(self.tokenizers.values()))))

    def prompt_room(self) -> int:
        return self.facts.chunks * self.facts.chunk_room


class ClipPairEncoder(ClipEncoder):
    """Several encoders side by side; the U-Net reads the layer before the last of each.

    Podell et al. 2023 (arXiv 2307.01952), section 2.1. The last encoder has a projection.
    """

    reading = ""  # likewise; a base with two encoders shares none with a base that has one

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, sum of widths] and the last encoder's `pooled` [B, projection].

        Of several chunks only the first gives `pooled`, as in kohya's trainers.
        """
        import torch

        outputs = [
            self._outputs(tokens, component, output_hidden_states=True)
            for component in self.networks
        ]
        states = [
            # States before the final norm, unlike those of Stable
            # Diffusion 1 with `clip_skip`, which are normed.
            self._text(tokens, component, output.hidden_states[-2])
            for component, output in zip(self.networks, outputs, strict=True)
        ]
        # The rows of a prompt's chunks follow each other, so every count-th row is a first chunk.
        pooled = outputs[-1].text_embeds[:: self.facts.chunks]
        return {"text": torch.cat(states, dim=-1), "pooled": pooled}
