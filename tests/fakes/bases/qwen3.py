"""A tiny random Qwen3 text encoder with a chat template, for the families that read it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3Config

from tests.fakes.bases.tokenizers import qwen2_tokenizer

WIDTH = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's template does with one user message."""


def tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level tokenizer with Qwen3's chat template."""
    return qwen2_tokenizer(chat_template=CHAT_TEMPLATE)


def config(*, layers: int, vocabulary: int) -> Qwen3Config:
    """Return the configuration of a Qwen3 of `WIDTH` channels with `layers` layers."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def enliven(network: nn.Module) -> None:
    """Redraw every weight, so that no output layer is zero and every input matters."""
    with torch.no_grad():
        for weights in network.parameters():
            if weights.dim() > 1:
                nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
            else:
                weights.add_(0.1 * torch.randn_like(weights))
