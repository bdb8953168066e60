"""Text encoders of flow-matching families: tokenizers, tokens of one length, hidden states, counting.

Tokens are int64 ids and masks on the CPU, hidden states float on the network's device. Families differ in
the template around a prompt, the layers they read, and padding. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.families.base import Conditioning, TextEncoder
from lora_trainer.families.text.sentence_pieces import SPIECE, load_spiece_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer of the class that its own files declare, without network access."""
    from transformers import AutoTokenizer

    if has_spiece_only(folder):
        return load_spiece_tokenizer(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    )
    return tokenizer


def has_spiece_only(folder: Path) -> bool:
    """Return whether a tokenizer has SentencePiece's file and no tokenizer.json, as in Chroma's releases."""
    return (folder / SPIECE).is_file() and not (folder / "tokenizer.json").is_file()


@dataclass(frozen=True, kw_only=True)
class TransformersEncoder(TextEncoder):
    """Networks of transformers and their tokenizers, by component; the last one reads the whole prompt."""

    networks: Mapping[str, nn.Module]
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    max_tokens: int
    """Tokens of a text that the last network reads, special tokens and template included."""
    free_tokens: ClassVar[int] = 0
    """Tokens of the template that do not count among `max_tokens`."""
    padding_side: ClassVar[str | None] = None
    """None: the tokenizer's own."""

    def template(self, prompt: str) -> str:
        """Return the text that is tokenized for a prompt."""
        return prompt

    @property
    def last(self) -> str:
        """The component that reads the whole prompt."""
        return tuple(self.networks)[-1]

    def tokens_of(
        self, component: str, prompts: Sequence[str], *, length: int, padding: str = "max_length"
    ) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 [B, length], truncated; `padding` "longest": as long as the longest."""
        side = {"padding_side": self.padding_side} if self.padding_side else {}
        tokens = self.tokenizers[component](
            [self.template(prompt) for prompt in prompts],
            padding=padding,
            **side,
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        return tokens["input_ids"], tokens["attention_mask"]

    def run(self, component: str, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        """Return a network's outputs; without a mask tokens attend to padding too."""
        network = self.networks[component]
        device = next(network.parameters()).device
        mask = None if mask is None else mask.to(device)
        return network(ids.to(device), attention_mask=mask, **options)

    def count_tokens(self, prompt: str) -> int:
        # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
        tokenizer = self.tokenizers[self.last]
        return len(tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids)

    def prompt_room(self) -> int:
        """Return the prompt tokens that fit beside special tokens and the empty template."""
        taken = len(self.tokenizers[self.last](self.template("")).input_ids)
        return self.max_tokens + self.free_tokens - taken


class PooledT5Encoder(TransformersEncoder):
    """CLIP (`text_encoder`) for one pooled vector, T5 (`text_encoder_2`) for the tokens."""

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        lengths = {
            "text_encoder": self.tokenizers["text_encoder"].model_max_length,
            "text_encoder_2": self.max_tokens,
        }
        return {
            name: self.tokens_of(name, prompts, length=length)[0]
            for name, length in lengths.items()
        }

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, max_tokens, channels], padding included, and `pooled` [B, channels]."""
        return {
            "text": self.run("text_encoder_2", tokens["text_encoder_2"])[0],
            # Before CLIP's projection, as FluxPipeline._get_clip_prompt_embeds.
            "pooled": self.run("text_encoder", tokens["text_encoder"]).pooler_output,
        }


class MaskedEncoder(TransformersEncoder):
    """One network whose texts keep their length; families say which states they read."""

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest prompt's length."""
        length = self.max_tokens + self.free_tokens
        ids, mask = self.tokens_of(self.last, prompts, length=length, padding="longest")
        return {"ids": ids, "mask": mask}

    def states(self, tokens: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the hidden states [B, tokens, channels] of all layers, the embeddings first, and the mask."""
        outputs = self.run(
            self.last, tokens["ids"], tokens["mask"], output_hidden_states=True, use_cache=False
        )
        return outputs.hidden_states, tokens["mask"].to(outputs.hidden_states[0].device)
