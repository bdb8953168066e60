"""The tokenizer of the embedded base: CLIP's byte-level BPE with a vocabulary learned from our captions.

Any text can be written with it (all 256 bytes, inside a word and at its end, are tokens), so captions
of a user's own images never meet an unknown token.
"""

from __future__ import annotations

import json
from pathlib import Path

from scenes import scene
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

CAPTIONS = 20_000
START, END = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77
# CLIP's word pattern (Radford et al. 2021): contractions, letters, single digits, other signs.
WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


def build_tokenizer(folder: Path, *, seed: int) -> CLIPTokenizer:
    """Learn merges from captions, write vocab.json and merges.txt into `folder`, and load them."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200, min_frequency=2, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator(
        (scene(seed, index, 8, 8).caption for index in range(CAPTIONS)), trainer
    )
    merges = json.loads(bpe.to_str())["model"]["merges"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [
        *alphabet,
        *(f"{sign}</w>" for sign in alphabet),
        *("".join(pair) for pair in merges),
        START,
        END,
    ]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(entries))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return CLIPTokenizer(
        vocab=str(folder / "vocab.json"),
        merges=str(folder / "merges.txt"),
        model_max_length=MAX_TOKENS,
    )
