"""Tiny tokenizers of the real classes, made offline: T5 (unigram), Gemma and Qwen2 (byte-level BPE).

Every character has a token of its own, so any two prompts differ and none has unknown tokens.
"""

from __future__ import annotations

import string

from transformers import CLIPTokenizer, GemmaTokenizer, Qwen2Tokenizer, T5Tokenizer

from lora_trainer.families.locate import EMBEDDED_FOLDER

_WORDS = ("▁a", "▁photo", "▁of", "▁the", "▁red", "▁blue", "▁square", "▁on")
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
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
