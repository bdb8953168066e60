"""How long captions are in CLIP's tokens, counted without torch or transformers.

Inputs: what is known of a base model, and texts. Output: how many tokens a caption may have before
its end is cut, and how many it has. Bases that read captions with another encoder have no
`CaptionLimit`: they take several times as much, and their count needs transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from lora_trainer.data.captions import clean
from lora_trainer.families.base import BaseFacts

CLIP_TOKENS, CLIP_SPECIAL_TOKENS = 77, 2
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


def caption_limit(facts: BaseFacts) -> CaptionLimit | None:
    """Return the limit of a base that reads captions with CLIP alone and is on this machine."""
    if facts.layout is None or facts.max_tokens != CLIP_TOKENS:
        return None
    folder = facts.layout.folder / _TOKENIZER_FOLDER
    return CaptionLimit(tokenizer=folder, tokens=CLIP_TOKENS - CLIP_SPECIAL_TOKENS)


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


def _read(folder: Path) -> Tokenizer:
    whole = folder / "tokenizer.json"
    if whole.is_file():
        return Tokenizer.from_file(str(whole))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    # Only the head is a remark: "# #" is a merge.
    pairs = (line.partition(" ") for line in lines if not line.startswith("#version"))
    merges = [(left, right) for left, _, right in pairs if right]
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
