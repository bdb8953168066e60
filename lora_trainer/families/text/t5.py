"""T5 text encoders of flow-matching families: loading, tokens of one length, hidden states, counting.

Inputs are a part's folder and prompts; outputs int64 ids and masks on the CPU, and float hidden states on
the network's device. `PooledT5Encoder` joins T5 with one CLIP for the pooled vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lora_trainer.families.base import Conditioning, Layout, TextEncoder
from lora_trainer.families.text.sentence_pieces import SPIECE, load_spiece_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


class NetworkLoader(Protocol):
    """A family that loads a text encoder from its file or folder."""

    def load_text_network(
        self, kind: Any, layout: Layout, component: str, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module: ...


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


def padded(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, length: int
) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [B, length], truncated, padded at the end."""
    tokens = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    return tokens["input_ids"], tokens["attention_mask"]


def hidden_states(network: nn.Module, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the last hidden states [B, length, channels]; without a mask tokens attend to padding too."""
    device = next(network.parameters()).device
    states: Tensor = network(
        ids.to(device), attention_mask=None if mask is None else mask.to(device)
    )[0]
    return states


def count_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Return the number of tokens of `prompt` before truncation, without special tokens."""
    # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
    return len(tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids)


def room(tokenizer: PreTrainedTokenizerBase, *, length: int, template: str = "") -> int:
    """Return the prompt tokens that fit into `length` beside special tokens and the empty template."""
    return length - len(tokenizer(template).input_ids)


@dataclass(frozen=True, kw_only=True)
class PooledT5Encoder(TextEncoder):
    """CLIP (`text_encoder`) for one pooled vector, T5 (`text_encoder_2`) for the tokens."""

    networks: Mapping[str, nn.Module]
    clip_tokenizer: PreTrainedTokenizerBase
    t5_tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        length = self.clip_tokenizer.model_max_length
        return {
            "text_encoder": padded(self.clip_tokenizer, prompts, length=length)[0],
            "text_encoder_2": padded(self.t5_tokenizer, prompts, length=self.max_tokens)[0],
        }

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, max_tokens, channels], padding included, and `pooled` [B, channels]."""
        clip = self.networks["text_encoder"]
        ids = tokens["text_encoder"].to(next(clip.parameters()).device)
        return {
            "text": hidden_states(self.networks["text_encoder_2"], tokens["text_encoder_2"]),
            # Before CLIP's projection, as FluxPipeline._get_clip_prompt_embeds.
            "pooled": clip(ids).pooler_output,
        }

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.t5_tokenizer, prompt)

    def prompt_room(self) -> int:
        return room(self.t5_tokenizer, length=self.max_tokens)
