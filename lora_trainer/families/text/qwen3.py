"""Qwen3 language models as text encoders: chat template, tokens, hidden states of chosen layers.

Input is a diffusers folder with `text_encoder` and `tokenizer`; outputs are conditioning tensors equal to
those of diffusers' pipelines. A family chooses layers, padding and thinking by its `PromptFormat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Conditioning, Layout, TextEncoder
from lora_trainer.families.base_files.base_folder import check_chat_template, read_json
from lora_trainer.families.text.t5 import NetworkLoader, count_tokens, room

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MAX_TOKENS = 512
"""The limit of diffusers' pipelines, chat template included."""
UNREAD = ("lm_head.",)
"""The language head, which scores words: 0.6 of the 8.2 billion parameters of Qwen3-8B."""
_SUPPORTED = "qwen3"


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How a family encodes a prompt.

    `layers` index the hidden states (0: embeddings, -2: before the last layer); several are joined
    along the channels. `padded`: each prompt has `MAX_TOKENS` tokens and no mask; otherwise prompts keep
    their length and get a `text_mask`. `thinking` is the chat template's `enable_thinking`.
    """

    layers: tuple[int, ...]
    padded: bool
    thinking: bool


def text_config(folder: Path) -> Mapping[str, Any]:
    """Return the text encoder's configuration.

    Raises InputError for a network other than Qwen3 and for a tokenizer without a chat template.
    """
    config = read_json(folder / "text_encoder" / "config.json")
    kind = config.get("model_type")
    if kind != _SUPPORTED:
        raise InputError(
            f"{folder / 'text_encoder'} is a text encoder of type {kind!r}, allowed is {_SUPPORTED!r}",
            fix="give a base model with a Qwen3 text encoder",
        )
    check_chat_template(folder / "tokenizer")
    return config


def load_qwen3(
    loader: NetworkLoader,
    layout: Layout,
    *,
    format: PromptFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> TextEncoder:
    """Load tokenizer and network, frozen, without the language head."""
    from transformers import AutoTokenizer, Qwen3Model

    network = loader.load_text_network(
        Qwen3Model, layout, "text_encoder", dtype=dtype, device=device
    )
    return _Qwen3TextEncoder(
        networks={"text_encoder": network},
        tokenizer=AutoTokenizer.from_pretrained(layout.folder / "tokenizer", local_files_only=True),
        format=format,
    )


def unpadded(text: Tensor, mask: Tensor) -> list[Tensor]:
    """Split texts [B, L, D] into tensors [length, D] without padding; `mask` [B, L] is 1 on real tokens."""
    if len(text) == 1 or mask.is_meta:
        # A single text has no padding. Reading the mask would synchronise with the device, and a meta
        # tensor has no values to read.
        return list(text)
    return [states[:length] for states, length in zip(text, mask.sum(1).tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Qwen3TextEncoder(TextEncoder):
    networks: Mapping[str, nn.Module]
    tokenizer: Any
    format: PromptFormat

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        tokens = self.tokenizer(
            [self._chat(prompt) for prompt in prompts],
            padding="max_length" if self.format.padded else "longest",
            max_length=MAX_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        return {"ids": tokens["input_ids"], "mask": tokens["attention_mask"]}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        network = self.networks["text_encoder"]
        device = next(network.parameters()).device
        mask = tokens["mask"].to(device)
        states = network(
            input_ids=tokens["ids"].to(device),
            attention_mask=mask,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        # The layers' channels one after another, as Flux2KleinPipeline._get_qwen3_prompt_embeds orders them.
        text = torch.cat([states[layer] for layer in self.format.layers], dim=-1)
        # klein's network gets no mask and reads the padding too.
        if self.format.padded:
            return {"text": text}
        # By the mask, not by length: whether the tokenizer pads at the
        # left or at the right is in its own files.
        texts = [states[is_token] for states, is_token in zip(text, mask.bool(), strict=True)]
        masks = [torch.ones(len(states), dtype=torch.int64, device=device) for states in texts]
        return {
            "text": pad_sequence(texts, batch_first=True),
            "text_mask": pad_sequence(masks, batch_first=True),
        }

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.tokenizer, prompt)

    def prompt_room(self) -> int:
        return room(self.tokenizer, length=MAX_TOKENS, template=self._chat(""))

    def _chat(self, prompt: str) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.format.thinking,
        )
        return text
