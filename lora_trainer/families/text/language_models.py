"""Language models as text encoders: Qwen3, Qwen2.5-VL and Gemma 2, with the template around a prompt.

Conditioning is equal to that of diffusers' pipelines: `text` [B, L, channels], zeros behind shorter prompts,
and `text_mask` [B, L]. A family chooses layers, padding and thinking of Qwen3 by a subclass. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Conditioning
from lora_trainer.families.base_files.base_folder import check_chat_template, read_json
from lora_trainer.families.text.transformers_encoder import MaskedEncoder

if TYPE_CHECKING:
    from torch import Tensor

QWEN3_TOKENS = 512
"""The limit of diffusers' pipelines, chat template included."""
QWEN3_UNREAD = ("lm_head.",)
"""The language head, which scores words: 0.6 of the 8.2 billion parameters of Qwen3-8B."""
QWEN_VL_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_VL_TEMPLATE_TOKENS = 34
"""Template tokens before the prompt: the language model reads them, the denoiser does not get them."""
QWEN_VL_TOKENS = 512
"""Limit of diffusers' pipeline for a prompt and the template's end together."""
QWEN_VL_UNREAD = ("visual.", "model.visual.", "lm_head.")
"""Prefixes of the vision tower and the language head, in old and new names: 1.2 of 8.3 billion parameters."""
LUMINA_SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text "
    "alignment based on textual prompts or user prompts. <Prompt Start> "
)
"""diffusers' pipeline puts it before a prompt; the base was trained with it."""


def text_config(folder: Path, *, kind: str) -> Mapping[str, Any]:
    """Return the text encoder's configuration; raises InputError for a network of another `kind`."""
    config = read_json(folder / "text_encoder" / "config.json")
    if config.get("model_type") != kind:
        raise InputError(
            f"{folder / 'text_encoder'} is a text encoder of type {config.get('model_type')!r}, "
            f"allowed is {kind!r}",
            fix="give the base's own text encoder",
        )
    return config


def qwen3_config(folder: Path) -> Mapping[str, Any]:
    """Return Qwen3's configuration; raises InputError for another network or a missing chat template."""
    config = text_config(folder, kind="qwen3")
    check_chat_template(folder / "tokenizer")
    return config


class Qwen3Encoder(MaskedEncoder):
    """Qwen3 behind its chat template."""

    layers: ClassVar[tuple[int, ...]]
    """Indices of the hidden states (0: embeddings, -2: before the last layer), joined along the channels."""
    padded: ClassVar[bool]
    """Each prompt has all `max_tokens` tokens and no mask."""
    thinking: ClassVar[bool]
    """The chat template's `enable_thinking`."""

    def template(self, prompt: str) -> str:
        tokenizer: Any = self.tokenizers[self.last]
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.thinking,
        )
        return text

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        padding = "max_length" if self.padded else "longest"
        ids, mask = self.tokens_of(self.last, prompts, length=self.max_tokens, padding=padding)
        return {"ids": ids, "mask": mask}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        states, mask = self.states(tokens)
        # The layers' channels one after another, as Flux2KleinPipeline._get_qwen3_prompt_embeds orders them.
        text = torch.cat([states[layer] for layer in self.layers], dim=-1)
        # klein's network gets no mask and reads the padding too.
        if self.padded:
            return {"text": text}
        # By the mask, not by length: whether the tokenizer pads at the
        # left or at the right is in its own files.
        texts = [states[is_token] for states, is_token in zip(text, mask.bool(), strict=True)]
        masks = [mask.new_ones(len(states)) for states in texts]
        return {
            "text": pad_sequence(texts, batch_first=True),
            "text_mask": pad_sequence(masks, batch_first=True),
        }


class QwenVLEncoder(MaskedEncoder):
    """The language model of Qwen2.5-VL; the template's beginning is dropped from the text."""

    free_tokens = QWEN_VL_TEMPLATE_TOKENS
    padding_side = "right"  # because `embed` drops the template's tokens at the front

    def template(self, prompt: str) -> str:
        return QWEN_VL_TEMPLATE.format(prompt)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        mask = mask[:, QWEN_VL_TEMPLATE_TOKENS:]
        return {
            "text": states[-1][:, QWEN_VL_TEMPLATE_TOKENS:] * mask[..., None],
            "text_mask": mask,
        }


class Gemma2Encoder(MaskedEncoder):
    """Gemma 2 on the prompt after the system prompt; an empty prompt is encoded alone, as in training.

    The pipeline pads to 256. The network cuts each text at its own length, so the result is the same.
    """

    padding_side = "right"  # the tokenizer's own is left; the pipeline sets right

    def template(self, prompt: str) -> str:
        return LUMINA_SYSTEM_PROMPT + prompt if prompt else ""

    def prompt_room(self) -> int:
        text = LUMINA_SYSTEM_PROMPT.rstrip(" ")
        return self.max_tokens - len(self.tokenizers[self.last](text).input_ids)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        return {"text": states[-2] * mask[..., None], "text_mask": mask}
