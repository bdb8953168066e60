"""The caption rules, from the caption in a file to the texts that a sample is trained with.

In this order: one of several captions; `{a|b}`; `[trigger]`; tags left out and shuffled, fixed tags excepted; prefix
and suffix; the trigger in front. Every random choice is a counter-based draw: a caption's variants depend on its
text, the settings and the seed alone, a sample's choice among them on its epoch alone. The variants are few and
computed before training, so all rules work with cached outputs of the text encoders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_trainer.common.caption_markup import has_choice, split_at_commas, with_choices_made
from lora_trainer.common.randomness import Stream, draw_choice, draw_uniform, shuffled
from lora_trainer.common.wording import without_secrets
from lora_trainer.config.declare import PROMPTS
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.running import SamplingSettings
from lora_trainer.dataset.captions import TRIGGER_PLACEHOLDER, clean, has_trigger, with_trigger


def plain_text(written: Sequence[str], *, settings: DataSettings) -> str:
    """Return an image's text without anything random: to validate with, to draw samples of, to show.

    The first caption, first alternatives, all tags in the order they are written in.
    """
    return _text(written[0], settings, None)


def sample_prompts(
    captions: Iterable[str], *, data: DataSettings, sampling: SamplingSettings[Any], concept: str
) -> tuple[str, ...]:
    """Return the prompts of the sample images: the setting, else `captions`, first ones first.

    Where no image says more than the trigger, prompts for the `concept` are made with it, or with the class
    word. At least one prompt is returned, the empty one if nothing is known.
    """
    if sampling.prompts:
        return sampling.prompts
    subject = (data.trigger or data.class_word or "").strip()
    # Prompts appear in reports and image files, so secrets are removed; training uses captions unchanged.
    texts = tuple(dict.fromkeys(without_secrets(caption) for caption in captions if caption))
    if subject and set(texts) <= {without_secrets(subject)}:
        texts = tuple(without_secrets(prompt.format(subject)) for prompt in PROMPTS[concept])
    return texts[: sampling.prompts_from_captions] or ("",)


def variants(written: Sequence[str], *, settings: DataSettings, seed: int) -> tuple[str, ...]:
    """Return the plain text of an image, then those it is trained with where these are others.

    `written` are its captions, `settings` those of its folder. Each caption is in equally many texts.
    Texts can be equal; they share a cache entry.
    """
    texts = [plain_text(written, settings=settings)]
    for number in range(1, _drawn(written, settings) + 1):
        caption = written[(number - 1) % len(written)]
        name = plain_text([caption], settings=settings)
        texts.append(_text(caption, settings, _Draw(seed=seed, caption=name, number=number)))
    return tuple(texts)


def max_texts(written: Sequence[str], *, settings: DataSettings) -> int:
    """Return how many different texts `variants` gives at most, without making them."""
    drawn = _drawn(written, settings)
    return 1 + drawn if drawn > len(written) else len(written)


def variant_of(sample_id: str, *, count: int, seed: int, epoch: int) -> int:
    """Return which of its `count` texts a sample is trained with in `epoch`."""
    return draw_choice(count, seed, Stream.CAPTION_VARIANT, epoch, sample_id)


def is_dropped(sample_id: str, *, settings: DataSettings, seed: int, epoch: int) -> bool:
    """Say whether a sample is trained with the empty caption in `epoch`, the first of which is 0."""
    every = settings.caption_dropout_every_epochs
    if every and (epoch + 1) % every == 0:
        return True
    return draw_uniform(seed, Stream.CAPTION_DROPOUT, epoch, sample_id) < settings.caption_dropout


def _drawn(written: Sequence[str], settings: DataSettings) -> int:
    """Return how many texts are drawn for training: a multiple of the captions; 0: the plain one is it."""
    captions = len(written)
    if _is_random(written, settings):
        return captions * math.ceil(settings.caption_variants / captions)
    return captions if captions > 1 else 0


def _is_random(written: Sequence[str], settings: DataSettings) -> bool:
    if settings.shuffle_tags or settings.tag_dropout > 0:
        return True
    around = (settings.caption_prefix, settings.caption_suffix)
    return settings.wildcards and any(map(has_choice, (*written, *around)))


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """The random draws for one variant of a caption."""

    seed: int
    caption: str
    number: int

    def choice(self, part: str, count: int, position: int) -> int:
        counters = (self.caption, self.number, part, position)
        return draw_choice(count, self.seed, Stream.WILDCARD, *counters)

    def kept(self, tags: Sequence[str], *, dropout: float) -> list[str]:
        draw = partial(draw_uniform, self.seed, Stream.TAG_DROPOUT, self.caption, self.number)
        return [tag for position, tag in enumerate(tags) if draw(position) >= dropout]

    def shuffled(self, tags: Sequence[str]) -> list[str]:
        return shuffled(tags, self.seed, Stream.TAG_SHUFFLE, self.caption, self.number)


def _text(caption: str, settings: DataSettings, draw: _Draw | None) -> str:
    """Apply all rules to one caption; without a draw those that are not random."""
    prefix, text, suffix = (
        _with_choices(part, words, settings, draw)
        for part, words in (
            ("prefix", settings.caption_prefix),
            ("caption", caption),
            ("suffix", settings.caption_suffix),
        )
    )
    trigger = (settings.trigger or "").strip()
    if trigger:
        text = text.replace(TRIGGER_PLACEHOLDER, trigger)
    text = _with_tags_arranged(text, trigger, settings, draw)
    return with_trigger(clean(f"{prefix} {text} {suffix}"), trigger)


def _with_choices(part: str, words: str, settings: DataSettings, draw: _Draw | None) -> str:
    if not settings.wildcards:
        return words
    return with_choices_made(words, partial(draw.choice, part) if draw else _first)


def _first(count: int, position: int) -> int:
    return 0


def _with_tags_arranged(text: str, trigger: str, settings: DataSettings, draw: _Draw | None) -> str:
    touched = draw is not None and (settings.shuffle_tags or settings.tag_dropout > 0)
    marks = (settings.keep_tokens_separator, settings.secondary_separator)
    if not touched and not any(mark and mark in text for mark in marks):
        return text  # commas stay as they are written
    front, middle, end = _tags(text, trigger if touched else "", settings)
    if draw is not None:
        middle = draw.kept(middle, dropout=settings.tag_dropout)
        middle = draw.shuffled(middle) if settings.shuffle_tags else middle
    glue = settings.secondary_separator
    return ", ".join(_separate(tag, glue) for tag in (*front, *middle, *end))


def _tags(
    text: str, trigger: str, settings: DataSettings
) -> tuple[list[str], list[str], list[str]]:
    """Return fixed tags in front, tags that rules may touch, and fixed tags at the end; the trigger's come first."""
    split = partial(_split, whole_brackets=settings.emphasis)
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


def _split(text: str, *, whole_brackets: bool) -> list[str]:
    parts = (part.strip() for part in split_at_commas(text, whole_brackets=whole_brackets))
    return [part for part in parts if part]


def _with_word_first(tags: Sequence[str], word: str) -> tuple[list[str], list[str]]:
    """Return the tags that contain a word, and the other tags."""
    matching = [tag for tag in tags if word and has_trigger(tag, word)]
    return matching, [tag for tag in tags if tag not in matching]


def _separate(tag: str, glue: str | None) -> str:
    """Return tags that a mark joined as single tags."""
    if not glue or glue not in tag:
        return tag
    return ", ".join(part for part in map(str.strip, tag.split(glue)) if part)
