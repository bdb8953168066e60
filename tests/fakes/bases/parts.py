"""Parts of the tiny bases: tokenizers of the real classes, made offline, and networks of a few channels.

Every character has a token of its own, so any two prompts differ and none has unknown tokens.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    GemmaTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from lora_trainer.families.locate import EMBEDDED_FOLDER

WIDTH = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's template does with one user message."""
FLUX_LATENTS = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_WORDS = ("▁a", "▁photo", "▁of", "▁the", "▁red", "▁blue", "▁square", "▁on")
_QWEN_SPECIAL = tuple(
    [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ]
)


def clip_tokenizer() -> CLIPTokenizer:
    """Return the embedded base's tokenizer: 77 tokens, CLIP's classes."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_FOLDER / "tokenizer")
    return tokenizer


def t5_tokenizer() -> T5Tokenizer:
    """Return a T5 tokenizer: `<pad>` 0, `</s>` 1, `<unk>` 2, words, then printable characters."""
    characters = dict.fromkeys(string.ascii_letters + string.digits + string.punctuation)
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((word, -3.0) for word in _WORDS),
        *((character, -6.0) for character in characters),
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


def gemma_tokenizer() -> GemmaTokenizer:
    """Return a Gemma tokenizer: special tokens, then printable characters and `▁` with a letter."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    characters = dict.fromkeys(
        "▁" + string.ascii_letters + string.digits + string.punctuation + "\n"
    )
    merges = [("▁", letter) for letter in string.ascii_letters]
    names = [*special, *characters, *(f"▁{letter}" for letter in string.ascii_letters)]
    return GemmaTokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=merges,  # type: ignore[arg-type]  # annotated as str, passed on to what takes pairs only
        add_bos_token=True,
        model_max_length=8192,
    )


def qwen3_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level tokenizer with Qwen3's chat template."""
    return qwen2_tokenizer(chat_template=CHAT_TEMPLATE)


def qwen2_tokenizer(*, chat_template: str | None = None) -> Qwen2Tokenizer:
    """Return a byte-level Qwen2 tokenizer with the chat markers; 256 bytes, no merges but the first few."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = sorted(bytes_to_unicode().values())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("r", "e"), ("re", "d")]
    names = [*symbols, *("".join(merge) for merge in merges), *_QWEN_SPECIAL]
    return Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=merges,  # type: ignore[arg-type]  # annotated as str, passed on to what takes pairs only
        chat_template=chat_template,
        additional_special_tokens=list(_QWEN_SPECIAL),
        model_max_length=131072,
        eos_token="<|im_end|>",
    )


# ---- networks


def saved(folder: Path, *, seed: int, build: Callable[[], Any]) -> Path:
    """Build a pipeline from random networks that depend on `seed` alone, and save it into `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = build()
    pipeline.save_pretrained(folder)
    return folder


def tiny_vae(kind: type[Any] = AutoencoderKL, *, levels: int = 2, **config: Any) -> Any:
    """Return a VAE of 8 channels that halves the sides at all levels but one."""
    return kind(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels,
        layers_per_block=1,
        norm_num_groups=4,
        **config,
    )


def flow_vae(*, levels: int = 2, **config: Any) -> AutoencoderKL:
    """Return a tiny VAE in FLUX.1's layout, with its latents' statistics unless others are given."""
    options: dict[str, Any] = {
        **FLUX_LATENTS,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        **config,
    }
    vae: AutoencoderKL = tiny_vae(levels=levels, **options)
    return vae


def tiny_clip(kind: type[Any], *, width: int = WIDTH, **config: Any) -> Any:
    """Return a CLIP text encoder for `clip_tokenizer`."""
    vocabulary = len(clip_tokenizer())
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 77,
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": vocabulary - 1,
    }
    return kind(CLIPTextConfig(**options | config))


def tiny_t5(*, width: int = WIDTH, **config: Any) -> T5EncoderModel:
    """Return a T5 v1.1 encoder for `t5_tokenizer`."""
    options: dict[str, Any] = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer()),
            d_model=width,
            feed_forward_proj="gated-gelu",
            **options,
            **config,
        )
    )


def qwen3_config(*, layers: int) -> Qwen3Config:
    """Return the configuration of a Qwen3 of `WIDTH` channels for `qwen3_tokenizer`."""
    return Qwen3Config(
        vocab_size=len(qwen3_tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def enliven(network: Any) -> Any:
    """Redraw every weight: an output or a gate that starts at zero would hide what is before it."""
    with torch.no_grad():
        for weights in network.parameters():
            if weights.dim() > 1:
                nn.init.normal_(weights, std=weights[0].numel() ** -0.5)
            else:
                weights.add_(0.1 * torch.randn_like(weights))
    return network


def enliven_matrices(network: Any) -> Any:
    """Redraw every matrix, a little smaller, and leave the vectors."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7 * max(1, parameter[0].numel()) ** -0.5)
    return network
