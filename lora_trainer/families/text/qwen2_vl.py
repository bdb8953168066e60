"""Qwen2.5-VL as Qwen-Image's text encoder: prompt template, tokens, last hidden states.

Input is a diffusers folder with `text_encoder` and `tokenizer`; outputs are `text` [B, L, width] and
`text_mask` [B, L] as diffusers' pipeline makes them. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Conditioning, Layout, TextEncoder
from lora_trainer.families.base_files.base_folder import read_json
from lora_trainer.families.text.t5 import NetworkLoader, count_tokens, load_tokenizer, room

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
"""Template tokens before the prompt: the language model reads them, the denoiser does not get them."""
MAX_TOKENS = 512
"""Limit of diffusers' pipeline for a prompt and the template's end together."""
UNREAD = ("visual.", "model.visual.", "lm_head.")
"""Prefixes of the vision tower and the language head, in old and new names: 1.2 of 8.3 billion parameters."""


def check_text_encoder(folder: Path) -> None:
    """Raise InputError when a folder's text encoder is no Qwen2.5-VL."""
    kind = read_json(folder / "text_encoder" / "config.json").get("model_type")
    if kind != "qwen2_5_vl":
        raise InputError(
            f"{folder / 'text_encoder'} is a text encoder of type {kind!r}, allowed is 'qwen2_5_vl'",
            fix="give the base's own text encoder",
        )


def load_qwen_vl(
    loader: NetworkLoader, layout: Layout, *, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load tokenizer and language model, frozen."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    whole: Any = loader.load_text_network(
        Qwen2_5_VLForConditionalGeneration,
        layout,
        "text_encoder",
        dtype=dtype,
        device=torch.device("cpu"),
    )
    # Keep the language model only: the vision tower and the language head (UNREAD) are freed here.
    network: nn.Module = whole.model.language_model
    return QwenVLTextEncoder(
        networks={"text_encoder": network.to(device)},
        tokenizer=load_tokenizer(layout.folder / "tokenizer"),
    )


@dataclass(frozen=True, kw_only=True)
class QwenVLTextEncoder(TextEncoder):
    """The language model of Qwen2.5-VL; texts keep their length."""

    networks: Mapping[str, nn.Module]
    tokenizer: PreTrainedTokenizerBase

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        tokens = self.tokenizer(
            [TEMPLATE.format(prompt) for prompt in prompts],
            padding=True,
            # `embed` drops the template's tokens at the front, so padding has to stand behind.
            padding_side="right",
            # The pipeline reads up to 1024 + 34 tokens and keeps the first 512 states. Each state sees
            # earlier tokens only (a causal model), so reading no more than these gives the same.
            max_length=TEMPLATE_TOKENS + MAX_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        return {"ids": tokens["input_ids"], "mask": tokens["attention_mask"]}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, L, width] and `text_mask` [B, L], zeros behind shorter prompts."""
        network = self.networks["text_encoder"]
        device = next(network.parameters()).device
        mask = tokens["mask"].to(device)
        states = network(
            input_ids=tokens["ids"].to(device), attention_mask=mask, use_cache=False
        ).last_hidden_state
        mask = mask[:, TEMPLATE_TOKENS:]
        return {"text": states[:, TEMPLATE_TOKENS:] * mask[..., None], "text_mask": mask}

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.tokenizer, prompt)

    def prompt_room(self) -> int:
        return room(
            self.tokenizer, length=TEMPLATE_TOKENS + MAX_TOKENS, template=TEMPLATE.format("")
        )
