"""The caption rules, from the caption in a file to the texts that a sample is trained with, and their length in tokens.

A caption that is a JSON object only gets the trigger. All others, in this order: one of several captions; `{a|b}`;
`[trigger]`; tags left out and shuffled, fixed tags excepted; prefix and suffix; the trigger in front. Every random
choice is a counter-based draw: a caption's variants depend on its text, the settings and the seed alone, a sample's
choice among them on its epoch alone. The variants are few and computed before training, so all rules work with cached
outputs of the text encoders.

Texts are counted with CLIP's tokenizer, to choose the number of chunks for `data.caption_tokens=auto` and to
name captions that are cut: the variants of each caption, and the same with the class word. Neither torch nor
transformers is imported; captions of bases with another encoder are not counted: they take several times as
many tokens, and counting them needs transformers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from lora_trainer.common.caption_markup import (
    NewWord,
    has_choice,
    split_at_commas,
    weighted_parts,
    with_choices_made,
    words_of,
)
from lora_trainer.common.events import Finding
from lora_trainer.common.files import sha256_bytes, sha256_file
from lora_trainer.common.memo import MemoTable
from lora_trainer.common.randomness import Stream, draw_choice, draw_uniform, shuffled
from lora_trainer.common.whole_words import holds_word, same_word, whole_word, words_in
from lora_trainer.common.wording import without_secrets
from lora_trainer.config.declare import CHUNK_TOKENS, concepts
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.running import Config
from lora_trainer.dataset.captions import clean, json_object
from lora_trainer.dataset.json_captions import with_word_inside
from lora_trainer.dataset.records import ImageRecord, finding
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family

TRIGGER_PLACEHOLDER = "[trigger]"
CLIP_TOKENS = 77
# 225 tokens: as much as kohya's trainers read.
MOST_CHUNKS = 3
_AT_ONCE = 4096
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


def plain_text(written: Sequence[str], *, settings: DataSettings) -> str:
    """Return an image's text without anything random: to validate with, to draw samples of, to show.

    The first caption, first alternatives, all tags in the order they are written in.
    """
    return _text(written[0], settings, None)


def sample_prompts(captions: Iterable[str], config: Config[Any]) -> tuple[str, ...]:
    """Return the prompts of the sample images: the setting, else `captions`, first ones first.

    Where no image says more than the trigger, prompts for the concept are made with it, or with the class
    word. At least one prompt is returned, the empty one if nothing is known.
    """
    sampling, data = config.sampling, config.data
    if sampling.prompts:
        return sampling.prompts
    subject = (data.trigger or data.class_word or "").strip()
    written: Iterable[str] = dict.fromkeys(filter(None, captions))
    if subject and set(map(same_word, written)) <= {same_word(subject)}:
        written = [prompt.format(subject) for prompt in concepts()[config.train.concept]["prompts"]]
    # Prompts appear in reports and image files, so secrets are removed; training uses captions unchanged.
    # Only as far as prompts are needed: 100,000 captions would take six seconds.
    texts: dict[str, None] = {}
    for text in written:
        if len(texts) == sampling.prompts_from_captions:
            break
        texts[without_secrets(text)] = None
    return tuple(texts) or ("",)


def variants(written: Sequence[str], *, settings: DataSettings, seed: int) -> tuple[str, ...]:
    """Return the plain text of an image, then those it is trained with where these are others.

    `written` are its captions, `settings` those of its folder. Each caption is in equally many texts.
    Texts can be equal; they share a cache entry.
    """
    texts = [plain_text(written, settings=settings)]
    for number in range(1, _drawn(written, settings) + 1):
        caption = written[(number - 1) % len(written)]
        name = plain_text([caption], settings=settings)
        texts.append(_text(caption, settings, (seed, name, number)))
    return tuple(texts)


def max_texts(written: Sequence[str], *, settings: DataSettings) -> int:
    """Return how many different texts `variants` gives at most, without making them."""
    drawn = _drawn(written, settings)
    return 1 + drawn if drawn > len(written) else len(written)


def has_trigger(caption: str, trigger: str) -> bool:
    """Say whether `trigger` stands in `caption` as a word of its own, in any case and script."""
    return holds_word(caption, trigger)


def words_beside(caption: str, trigger: str) -> tuple[str, ...]:
    """Return the words of a caption beside the trigger word, without a number at its end: `moppel_03` is `moppel`."""
    rest = whole_word(trigger).sub(" ", caption.replace(TRIGGER_PLACEHOLDER, " "))
    own = set(words_in(_without_numbers(trigger)))
    return tuple(word for word in words_in(_without_numbers(rest)) if word not in own)


def _without_numbers(text: str) -> str:
    return text.replace("_", " ").rstrip("0123456789 ()#.-")


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger where the caption says `[trigger]`, else in front unless it has it."""
    word = "" if trigger is None else trigger.strip()
    if not word:
        return caption
    if TRIGGER_PLACEHOLDER in caption:
        return caption.replace(TRIGGER_PLACEHOLDER, word)
    if has_trigger(caption, word):
        return caption
    return f"{word}, {caption}" if caption else word


def class_texts(texts: Iterable[str], *, settings: DataSettings) -> list[str | None]:
    """Return each text with the class word in place of the trigger, None for one without the trigger.

    Empty without class word or trigger.
    """
    word, trigger = settings.class_word, settings.trigger
    if word is None or trigger is None:
        return []
    in_place, pattern = word.strip(), whole_word(trigger)
    # An empty trigger, that of a folder without one, stands nowhere.
    replaced = (pattern.subn(lambda _: in_place, text) for text in texts)
    return [text if count else None for text, count in replaced]


def _drawn(written: Sequence[str], settings: DataSettings) -> int:
    """Return how many texts are drawn for training: a multiple of the captions; 0: the plain one is it."""
    captions = len(written)
    texts = (*written, settings.caption_prefix, settings.caption_suffix)
    has_choices = settings.wildcards and any(map(has_choice, texts))
    if settings.shuffle_tags or settings.tag_dropout > 0 or has_choices:
        return captions * math.ceil(settings.caption_variants / captions)
    return captions if captions > 1 else 0


# Seed, caption and number of one variant, which name its random draws.
_Draw = tuple[int, str, int]


def _text(caption: str, settings: DataSettings, draw: _Draw | None) -> str:
    """Apply all rules to one caption; without a draw those that are not random."""

    if (value := json_object(caption)) is not None:
        # No rule for words: braces and commas are its own, and text before or behind it would break it.
        trigger = (settings.trigger or "").strip()
        return with_word_inside(value, trigger, placeholder=TRIGGER_PLACEHOLDER)

    def choose(part: str, count: int, position: int) -> int:
        if draw is None:
            return 0
        seed, variant = draw[0], draw[1:]
        return draw_choice(count, seed, Stream.WILDCARD, *variant, part, position)

    prefix, text, suffix = settings.caption_prefix, caption, settings.caption_suffix
    if settings.wildcards:
        prefix = with_choices_made(prefix, partial(choose, "prefix"))
        text = with_choices_made(text, partial(choose, "caption"))
        suffix = with_choices_made(suffix, partial(choose, "suffix"))
    trigger = (settings.trigger or "").strip()
    if trigger:
        text = text.replace(TRIGGER_PLACEHOLDER, trigger)
    text = _with_tags_arranged(text, trigger, settings, draw)
    return with_trigger(clean(f"{prefix} {text} {suffix}"), trigger)


def _with_tags_arranged(text: str, trigger: str, settings: DataSettings, draw: _Draw | None) -> str:
    touched = draw is not None and (settings.shuffle_tags or settings.tag_dropout > 0)
    marks = (settings.keep_tokens_separator, settings.secondary_separator)
    if not touched and not any(mark and mark in text for mark in marks):
        return text  # commas stay as they are written
    front, middle, end = _tags(text, trigger if touched else "", settings)
    if draw is not None:
        seed, variant = draw[0], draw[1:]
        uniform = partial(draw_uniform, seed, Stream.TAG_DROPOUT, *variant)
        middle = [tag for place, tag in enumerate(middle) if uniform(place) >= settings.tag_dropout]
        if settings.shuffle_tags:
            middle = shuffled(middle, seed, Stream.TAG_SHUFFLE, *variant)
    tags, glue = [*front, *middle, *end], settings.secondary_separator
    if glue:  # the tags that it joined are single tags again
        tags = [", ".join(filter(None, map(str.strip, tag.split(glue)))) for tag in tags]
    return ", ".join(tags)


def _tags(
    text: str, trigger: str, settings: DataSettings
) -> tuple[list[str], list[str], list[str]]:
    """Return fixed tags in front, tags that rules may touch, and fixed tags at the end; the trigger's come first."""

    def split(part: str) -> list[str]:
        tags = split_at_commas(part, whole_brackets=settings.emphasis)
        return [tag for tag in map(str.strip, tags) if tag]

    mark = settings.keep_tokens_separator
    if mark and mark in text:
        head, _, rest = text.partition(mark)
        inner, _, tail = rest.partition(mark)
        with_trigger_word, middle = _with_word_first(split(inner), trigger)
        return with_trigger_word + split(head), middle, split(tail.replace(mark, ","))
    with_trigger_word, others = _with_word_first(split(text), trigger)
    tags = with_trigger_word + others
    # A trigger that will be put in front counts as the first tag, as one that is written does.
    missing = 1 if trigger and not with_trigger_word else 0
    fixed_count = max(settings.keep_tokens - missing, len(with_trigger_word))
    return tags[:fixed_count], tags[fixed_count:], []


def _with_word_first(tags: Sequence[str], word: str) -> tuple[list[str], list[str]]:
    """Return the tags that contain a word, and the other tags."""
    matching = [tag for tag in tags if word and has_trigger(tag, word)]
    return matching, [tag for tag in tags if tag not in matching]


# ---- how many tokens the texts have


def caption_limit(facts: BaseFacts, *, chunks: int) -> dict[str, Any] | None:
    """Return how many tokens of a caption are read, and the folder of the tokenizer that counts them.

    None for a base that reads captions with another encoder than CLIP, or is not on this machine.
    """
    folder = tokenizer_folder(facts)
    if folder is None or facts.release.max_tokens != CLIP_TOKENS:
        return None
    return {"tokenizer": str(folder), "tokens": chunks * CHUNK_TOKENS}


def tokenizer_folder(facts: BaseFacts) -> Path | None:
    """Return the folder of the first tokenizer of a base that is on this machine."""
    return None if facts.layout is None else facts.layout.folder / "tokenizer"


def new_word(config: Config) -> NewWord | None:
    """Return the word whose meaning is learned; None: none is."""
    if config.adapter.new_tokens == 0:
        return None
    return NewWord(text=(config.data.trigger or "").strip(), tokens=config.adapter.new_tokens)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read a tokenizer's files; None where there are none that can be read."""
    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
            # Only the head is a remark: "# #" is a merge.
            pairs = (line.partition(" ") for line in lines if not line.startswith("#version"))
            model = models.BPE(
                vocab=json.loads((folder / "vocab.json").read_text(encoding="utf-8")),
                merges=[(first, second) for first, _, second in pairs if second],
                continuing_subword_prefix="",
                end_of_word_suffix="</w>",
                unk_token="<|endoftext|>",
            )
            tokenizer = Tokenizer(model)
            tokenizer.normalizer = normalizers.Sequence(
                [
                    normalizers.NFC(),
                    normalizers.Replace(Regex(r"\s+"), " "),
                    normalizers.Lowercase(),
                ]
            )
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
    # What the readers, written in Rust, raise is a plain Exception.
    except Exception:  # noqa: BLE001 - a count is a help; without it nothing is missing
        return None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def count_tokens(tokenizer: Tokenizer, captions: Sequence[str]) -> list[int]:
    """Return the tokens of captions as they are trained, special ones excepted; computed on all cores."""
    lengths: list[int] = []
    for first in range(0, len(captions), _AT_ONCE):
        part = [clean(caption) for caption in captions[first : first + _AT_ONCE]]
        encoded = tokenizer.encode_batch(part, add_special_tokens=False)
        lengths += [len(each.ids) for each in encoded]
    return lengths


@dataclass(frozen=True, kw_only=True)
class Reading:
    """In how many chunks texts are read, and why."""

    chunks: int
    reason: str
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Number of images by the tokens of their longest text; empty if they could not be counted."""
    longest_file: str = ""
    """The image with the longest text of all."""


def reading_of(
    records: Sequence[ImageRecord],
    *,
    config: Config,
    facts: BaseFacts,
    family: Family,
    cache_root: Path,
) -> Reading:
    """Return in how many chunks the texts of a run are read; the lengths are remembered in `cache_root`."""
    caption_tokens = config.data.caption_tokens
    if not family.text.chunks:
        return Reading(
            chunks=1,
            reason=f"{facts.source} reads up to {facts.release.max_tokens} tokens in one piece",
        )
    tokenizer = tokenizer_folder(facts)
    lengths, longest_file = dict[int, int](), ""
    if tokenizer is not None:
        lengths, longest_file = _lengths(records, config, tokenizer, cache_root)
    if caption_tokens != "auto":
        chunks, reason = caption_tokens // CHUNK_TOKENS, ""
    elif not lengths:
        chunks, reason = 1, "captions are counted once the base is on this machine"
    else:
        room, longest = facts.chunk_room, max(lengths)
        chunks = min(MOST_CHUNKS, max(1, -(-longest // room)))
        reason = f"the longest caption has {longest} tokens"
        if longest > room:
            longer = _longer(lengths, room)
            reason += f", {longer} of {sum(lengths.values())} have more than {room}"
    return Reading(chunks=chunks, reason=reason, lengths=lengths, longest_file=longest_file)


def _lengths(
    records: Sequence[ImageRecord], config: Config, tokenizer: Path, cache_root: Path
) -> tuple[dict[int, int], str]:
    """Return the images by the tokens of their longest text, and the one of the longest; nothing without a tokenizer.

    Remembered by a digest of all that they depend on: to count the texts of 100,000 images takes 15 s.
    """
    word, emphasis = new_word(config), config.data.emphasis
    of_images = [(record.name, _texts(record, config)) for record in records]
    files = [(file.name, sha256_file(file)) for file in sorted(tokenizer.glob("*"))]
    digest = sha256_bytes(repr((files, emphasis, word, of_images)).encode())
    memo = MemoTable.load(cache_root, "caption lengths")
    if (remembered := memo.get(digest)) is not None:
        lengths, longest_file = json.loads(remembered)
        return {int(tokens): images for tokens, images in lengths.items()}, longest_file
    reader = read_tokenizer(tokenizer)
    if reader is None or not of_images:
        return {}, ""
    texts = list({text for _, image_texts in of_images for text in image_texts})
    # As text encoders read them: without marks of emphasis, the new word as its tokens.
    words = [words_of(weighted_parts(text)) if emphasis else text for text in texts]
    parts = [word.split(text) if word else [text] for text in words]
    counts = iter(count_tokens(reader, [part for each in parts for part in each]))
    tokens_of = {
        text: sum(next(counts) for _ in each) + (word.tokens if word else 0) * (len(each) - 1)
        for text, each in zip(texts, parts, strict=True)
    }
    longest = [(-max(map(tokens_of.__getitem__, each)), name) for name, each in of_images]
    lengths = Counter(-tokens for tokens, _ in longest)
    longest_file = min(longest)[1]
    memo.put(digest, json.dumps([lengths, longest_file]))
    memo.save()
    return lengths, longest_file


def _longer(lengths: Mapping[int, int], tokens: int) -> int:
    """Return how many images have a text of more tokens."""
    return sum(images for count, images in lengths.items() if count > tokens)


def _texts(record: ImageRecord, config: Config) -> tuple[str, ...]:
    """Return every text that an image is trained with, those of the class among them."""
    settings = record.settings(config.data)
    texts = variants(record.written, settings=settings, seed=config.train.seed)
    preserves = config.objective.preservation_weight
    classes = class_texts(texts, settings=settings) if preserves else []
    return (*texts, *filter(None, classes))


def too_long(reading: Reading, *, facts: BaseFacts) -> Iterator[Finding]:
    """Yield a warning where ends of captions are not read, with the setting that reads them."""
    room, longest = reading.chunks * facts.chunk_room, max(reading.lengths, default=0)
    if longest > room:
        yield finding(
            "caption-too-long" if reading.chunks < MOST_CHUNKS else "caption-too-long.most",
            longer=_longer(reading.lengths, room),
            all=sum(reading.lengths.values()),
            room=room,
            longest=longest,
            file=reading.longest_file,
            most=MOST_CHUNKS * CHUNK_TOKENS,
        )
