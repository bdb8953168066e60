"""The length of captions in CLIP's tokens, counted without torch or transformers.

Inputs: the facts of a base model, and texts. Output: the number of tokens after which a caption is cut, and the
number it has. Bases that read captions with another encoder have no `CaptionLimit`: they take several times as
many tokens, and counting them needs transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from lora_trainer.config.running import Config
from lora_trainer.dataset.captions import clean
from lora_trainer.families.base import BaseFacts, NewWord

CLIP_TOKENS, CLIP_SPECIAL_TOKENS = 77, 2
_AT_ONCE = 4096
_TOKENIZER_FOLDER = "tokenizer"
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@dataclass(frozen=True, kw_only=True)
class CaptionLimit:
    """How many tokens of a caption are read, and the folder of the tokenizer that counts them."""

    tokenizer: Path
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `check --json`."""
        return {"tokenizer": str(self.tokenizer), "tokens": self.tokens}


def caption_limit(facts: BaseFacts, *, chunks: int) -> CaptionLimit | None:
    """Return the limit of a base that reads captions with CLIP alone, in so many chunks, and is on this machine."""
    folder = tokenizer_folder(facts)
    if folder is None or facts.max_tokens != CLIP_TOKENS:
        return None
    return CaptionLimit(tokenizer=folder, tokens=chunks * (CLIP_TOKENS - CLIP_SPECIAL_TOKENS))


def tokenizer_folder(facts: BaseFacts) -> Path | None:
    """Return the folder of the first tokenizer of a base that is on this machine."""
    return None if facts.layout is None else facts.layout.folder / _TOKENIZER_FOLDER


def new_word(config: Config) -> NewWord | None:
    """Return the word whose meaning is learned; None: none is."""
    if config.adapter.new_tokens == 0:
        return None
    return NewWord(text=(config.data.trigger or "").strip(), tokens=config.adapter.new_tokens)


class TokenCounter:
    """Counts the tokens of captions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TokenCounter | None:
        """Read a tokenizer's files; None where there are none that can be read."""
        try:
            tokenizer = _read(folder)
        # The reader of tokenizer.json, written in Rust, raises plain Exception.
        except Exception:  # noqa: BLE001 - a count is a help; without it nothing is missing
            return None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer)

    def count(self, caption: str) -> int:
        """Return the tokens of a caption as it is trained, special ones excepted."""
        return len(self._tokenizer.encode(clean(caption), add_special_tokens=False).ids)

    def counts(self, captions: Sequence[str]) -> list[int]:
        """Return `count` of many captions, computed on all cores."""
        lengths: list[int] = []
        for first in range(0, len(captions), _AT_ONCE):
            part = [clean(caption) for caption in captions[first : first + _AT_ONCE]]
            encoded = self._tokenizer.encode_batch(part, add_special_tokens=False)
            lengths += [len(each.ids) for each in encoded]
        return lengths


def _read(folder: Path) -> Tokenizer:
    whole = folder / "tokenizer.json"
    if whole.is_file():
        return Tokenizer.from_file(str(whole))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    # Only the head is a remark: "# #" is a merge.
    pairs = (line.partition(" ") for line in lines if not line.startswith("#version"))
    merges = [(first, right) for first, _, right in pairs if right]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            unk_token="<|endoftext|>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
