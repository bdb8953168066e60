"""Markup in captions and prompts: `{a|b}`, `(word:1.2)`, brackets around commas, a new word.

Inputs are one-line texts; outputs are texts, their parts, or their parts with weights. No function raises:
unmatched brackets and numbers out of range are ordinary text, and nesting has no depth limit because
nothing here recurses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from lora_trainer.common.whole_words import COMMAS, whole_word

# Factor of a pair of round brackets on a weight; square brackets divide by it.
STRONGER = 1.1
MAX_WEIGHT = 100.0
_CHOICE = {"{": "}"}
_EMPHASIS = {"(": ")", "[": "]"}
_WEIGHT = re.compile(r":\s*\+?(\d+\.?\d*|\.\d+)\s*", re.ASCII)

# A character, or a backslash with the character that it escapes.
_TOKEN = re.compile(r"\\?.", re.DOTALL)

Choose = Callable[[int, int], int]
Weighted = tuple[str, float]


def with_choices_made(text: str, choose: Choose) -> str:
    r"""Replace each `{a|b|c}`, nested ones too, by the alternative with index `choose(count, place)`.

    `place` is the opening bracket's index in the text. `{a}` has no alternatives and stays; `\{`, `\|` and
    `\}` are the literal characters.
    """
    partners = _partners(text, _CHOICE)
    ends = set(partners.values())
    outer = [""]
    groups: list[tuple[int, list[str]]] = []
    for token in _TOKEN.finditer(text):
        index, mark, words = token.start(), token[0], groups[-1][1] if groups else outer
        if mark[0] == "\\":
            words[-1] += mark[1:] if mark[1:] in _CHOICE_MARKS else mark
        elif index in partners:
            groups.append((index, [""]))
        elif index in ends:
            opened_at, words = groups.pop()
            alternative = (
                words[choose(len(words), opened_at)] if len(words) > 1 else f"{{{words[0]}}}"
            )
            (groups[-1][1] if groups else outer)[-1] += alternative
        elif mark == "|" and groups:
            words.append("")
        else:
            words[-1] += mark
    return outer[0]


_CHOICE_MARKS = ("{", "|", "}")
_EMPHASIS_MARKS = ("(", ")", "[", "]", "\\")


def has_choice(text: str) -> bool:
    """Return whether a text has a bracket with alternatives."""
    places: list[int] = []

    def choose(_count: int, place: int) -> int:
        places.append(place)
        return 0

    if "{" in text:
        with_choices_made(text, choose)
    return bool(places)


def weighted_parts(text: str) -> list[Weighted]:
    r"""Split a text into parts with weights, as Stable Diffusion web UI writes them.

    `(word)` weighs 1.1, `[word]` 1 / 1.1, `(word:1.3)` 1.3; nested weights multiply. `\(`, `\)`, `\[`,
    `\]` and `\\` are the literal characters.
    """
    partners = _partners(text, _EMPHASIS)
    ends = set(partners.values())
    # Opening index -> factor of each bracket, and begin -> end of each explicit number.
    factors, numbers = dict[int, float](), dict[int, int]()
    for begin, end in partners.items():
        factors[begin] = STRONGER if text[begin] == "(" else 1 / STRONGER
        colon = text.rfind(":", begin, end)
        number = _WEIGHT.fullmatch(text, colon, end) if colon >= 0 else None
        if text[begin] == "(" and number and float(number[1]) <= MAX_WEIGHT:
            factors[begin] = float(number[1])
            numbers[colon] = end
    weights, parts, read = [1.0], list[Weighted](), 0
    for token in _TOKEN.finditer(text):
        index, mark = token.start(), token[0]
        read = max(read, numbers.get(index, 0))
        if index < read:  # in an explicit number
            continue
        if mark[0] == "\\":
            parts.append((mark[1:] if mark[1:] in _EMPHASIS_MARKS else mark, weights[-1]))
        elif index in partners:
            weights.append(min(weights[-1] * factors[index], MAX_WEIGHT))
        elif index in ends:
            weights.pop()
        else:
            parts.append((mark, weights[-1]))
    return [
        ("".join(words for words, _ in group), weight)
        for weight, group in groupby(parts, key=lambda part: part[1])
    ]


def plainly(text: str) -> list[Weighted]:
    """Return a text without markup as weighted parts: the whole text with weight 1."""
    return [(text, 1.0)] if text else []


def words_of(parts: Iterable[Weighted]) -> str:
    """Join the texts of weighted parts."""
    return "".join(words for words, _ in parts)


def split_at_commas(text: str, *, whole_brackets: bool) -> list[str]:
    """Split at commas of any script; with `whole_brackets` not at those inside brackets of `weighted_parts`."""
    if not whole_brackets:
        return re.split(f"[{COMMAS}]", text)
    partners = _partners(text, _EMPHASIS)
    parts, first, closed = list[str](), 0, -1
    for index, mark in enumerate(text):
        if index <= closed:
            continue
        if index in partners:
            closed = partners[index]
        elif mark in COMMAS:
            parts.append(text[first:index])
            first = index + 1
    return [*parts, text[first:]]


def _partners(text: str, kinds: Mapping[str, str]) -> dict[int, int]:
    """Return opening -> closing index of each matched bracket; escaped brackets do not count."""
    partners: dict[int, int] = {}
    waiting: list[tuple[str, int]] = []
    open_ones: Counter[str] = Counter()
    for token in _TOKEN.finditer(text):
        index, mark = token.start(), token[0]
        if mark in kinds:
            waiting.append((kinds[mark], index))
            open_ones[kinds[mark]] += 1
        elif open_ones[mark] > 0:
            closes = ""
            while closes != mark:  # brackets opened in between stay unmatched
                closes, begin = waiting.pop()
                open_ones[closes] -= 1
            partners[begin] = index
    return partners


@dataclass(frozen=True, kw_only=True)
class NewWord:
    """A word that text encoders read as `tokens` new tokens with ids -1, -2 and so on.

    The ids are negative because CLIP takes the position of the largest id as the end of the text.
    """

    text: str
    tokens: int

    def pieces(self, text: str) -> list[tuple[int, int]]:
        """Return start and end of the pieces of a text between the places where it has the word, if empty ones too."""
        found = [match.span() for match in whole_word(self.text).finditer(text)]
        starts = [0, *(end for _, end in found)]
        ends = [*(start for start, _ in found), len(text)]
        return list(zip(starts, ends, strict=True))

    def split(self, text: str) -> list[str]:
        """Split a text where it has the word, in any case, as a word of its own."""
        return [text[start:end] for start, end in self.pieces(text)]

    @property
    def numbers(self) -> list[int]:
        """The ids of the word's tokens, in order."""
        return [-number for number in range(1, self.tokens + 1)]
