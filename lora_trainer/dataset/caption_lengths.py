"""The length of a dataset's captions in CLIP's tokens, and the number of chunks they are read in.

Inputs: records, settings and the tokenizer of a base. Outputs: the number of images with captions longer than one,
two or three chunks, the number of chunks for `data.caption_tokens=auto`, and a finding about captions that are cut.
Every text that training can read is counted: the variants of each caption, and the same with the class word. Neither
torch nor transformers is imported; captions of bases with another encoder are not counted: they take several times
as many tokens, and counting them needs transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from lora_trainer.common.caption_markup import NewWord, weighted_parts, words_of
from lora_trainer.common.events import Finding
from lora_trainer.common.files import sha256_file
from lora_trainer.common.memo import MemoTable
from lora_trainer.config.declare import CHUNK_TOKENS
from lora_trainer.config.running import Config
from lora_trainer.dataset.caption_rules import variants
from lora_trainer.dataset.captions import clean, of_class
from lora_trainer.dataset.records import ImageRecord, finding
from lora_trainer.families.base import Family
from lora_trainer.families.facts import BaseFacts

CLIP_TOKENS = 77
_AT_ONCE = 4096
_TOKENIZER_FOLDER = "tokenizer"
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


def caption_limit(facts: BaseFacts, *, chunks: int) -> dict[str, Any] | None:
    """Return how many tokens of a caption are read, and the folder of the tokenizer that counts them.

    None for a base that reads captions with another encoder than CLIP, or is not on this machine.
    """
    folder = tokenizer_folder(facts)
    if folder is None or facts.max_tokens != CLIP_TOKENS:
        return None
    return {"tokenizer": str(folder), "tokens": chunks * CHUNK_TOKENS}


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


KEY = "data.caption_tokens"
MEMO = "caption lengths"
"""The table with the lengths of earlier datasets, by a digest of all their texts: to count 100,000 takes 15 s."""
MOST_CHUNKS = 3
"""225 tokens: as much as kohya's trainers read."""


@dataclass(frozen=True, kw_only=True)
class CaptionLengths:
    """How many images have a longest text of so many tokens, and the image of the longest of all."""

    images: Mapping[int, int]
    longest_file: str

    @property
    def longest(self) -> int:
        return max(self.images)

    @property
    def all_images(self) -> int:
        return sum(self.images.values())

    def longer_than(self, tokens: int) -> int:
        """Return how many images have a text of more tokens."""
        return sum(images for count, images in self.images.items() if count > tokens)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """In how many chunks texts are read, and why; `lengths` is None where they could not be counted."""

    chunks: int
    reason: str
    lengths: CaptionLengths | None = None


def caption_lengths(
    records: Iterable[ImageRecord], *, config: Config, tokenizer: Path, memo: MemoTable
) -> CaptionLengths | None:
    """Count the tokens of every text that is trained with; None where nothing can be counted."""
    of_images = [(record.name, tuple(_texts(record, config))) for record in records]
    digest = _digest(of_images, config=config, tokenizer=tokenizer)
    remembered = memo.get(digest)
    if remembered is not None:
        images, longest_file = json.loads(remembered)
        counts = {int(tokens): int(count) for tokens, count in images.items()}
        return CaptionLengths(images=counts, longest_file=longest_file)
    counter = TokenCounter.load(tokenizer)
    if counter is None or not of_images:
        return None
    texts = list({text for _, image_texts in of_images for text in image_texts})
    tokens_of = dict(zip(texts, _counted(texts, config, counter), strict=True))
    longest = [
        (max(tokens_of[text] for text in image_texts), name) for name, image_texts in of_images
    ]
    _, name = min(longest, key=lambda pair: (-pair[0], pair[1]))
    lengths = CaptionLengths(images=Counter(count for count, _ in longest), longest_file=name)
    memo.put(digest, json.dumps([lengths.images, lengths.longest_file]))
    memo.save()
    return lengths


def _digest(
    of_images: Iterable[tuple[str, Sequence[str]]], *, config: Config, tokenizer: Path
) -> str:
    """Return a digest of all that the lengths depend on: the tokenizer's files, the texts, how they are read."""
    digest = hashlib.sha256(repr((config.data.emphasis, new_word(config))).encode())
    for file in sorted(tokenizer.glob("*")):
        digest.update(f"{file.name} {sha256_file(file)}\n".encode())
    for name, texts in of_images:
        digest.update("\0".join((name, *texts, "\n")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def reading_of(
    records: Sequence[ImageRecord],
    *,
    config: Config,
    facts: BaseFacts,
    family: Family,
    memo: MemoTable,
) -> Reading:
    """Return in how many chunks the texts of a run are read."""
    caption_tokens = config.data.caption_tokens
    if not family.text.chunks:
        return Reading(
            chunks=1, reason=f"{facts.source} reads up to {facts.max_tokens} tokens in one piece"
        )
    tokenizer, lengths = tokenizer_folder(facts), None
    if tokenizer is not None:
        lengths = caption_lengths(records, config=config, tokenizer=tokenizer, memo=memo)
    if caption_tokens != "auto":
        return Reading(chunks=caption_tokens // CHUNK_TOKENS, reason="", lengths=lengths)
    if lengths is None:
        return Reading(chunks=1, reason="captions are counted once the base is on this machine")
    room = facts.chunk_room
    chunks = min(MOST_CHUNKS, max(1, -(-lengths.longest // room)))
    longer = lengths.longer_than(room)
    reason = f"the longest caption has {lengths.longest} tokens"
    if longer:
        reason += f", {longer} of {lengths.all_images} have more than {room}"
    return Reading(chunks=chunks, reason=reason, lengths=lengths)


def too_long(reading: Reading, *, facts: BaseFacts) -> Iterator[Finding]:
    """Yield a warning where ends of captions are not read, with the setting that reads them."""
    room = reading.chunks * facts.chunk_room
    lengths = reading.lengths
    if lengths is None or lengths.longest <= room:
        return
    yield finding(
        "caption-too-long" if reading.chunks < MOST_CHUNKS else "caption-too-long.most",
        longer=lengths.longer_than(room),
        all=lengths.all_images,
        room=room,
        longest=lengths.longest,
        file=lengths.longest_file,
        most=MOST_CHUNKS * CHUNK_TOKENS,
    )


def _texts(record: ImageRecord, config: Config) -> Iterator[str]:
    settings = record.settings(config.data)
    word = settings.class_word if config.objective.preservation_weight else None
    for text in variants(record.written, settings=settings, seed=config.train.seed):
        yield text
        if word is not None and settings.trigger is not None:
            yield of_class(text, trigger=settings.trigger, class_word=word) or ""


def _counted(texts: Sequence[str], config: Config, counter: TokenCounter) -> list[int]:
    """Count texts as text encoders read them: without marks of emphasis, the new word as its tokens."""
    words = [words_of(weighted_parts(text)) for text in texts] if config.data.emphasis else texts
    learned = new_word(config)
    if learned is None:
        return counter.counts(words)
    parts = [learned.split(text) for text in words]
    counts = iter(counter.counts([part for each in parts for part in each]))
    return [sum(next(counts) for _ in each) + learned.tokens * (len(each) - 1) for each in parts]
