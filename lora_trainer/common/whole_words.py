"""Words in captions of any script: where a word stands as a word of its own, and which words a text has.

Latin, Greek, Cyrillic and most other scripts put blanks between words. Chinese, Japanese, Thai, Lao, Khmer and
Burmese do not: there a word may have letters on both sides (`照片里的小明在跑步`), and only what belongs to the same
syllable (a vowel sign, a tone mark, a mark of repetition) or to the same run of Katakana continues it. Korean has
blanks, but writes particles onto a noun: `미나가` is 미나, `미나리` is another word. Composed and decomposed spellings
(NFC, NFD) are equal, and in a word so are the apostrophes and hyphens that editors put in for each other. Positions are
those of the text as it is written.

Sources: Unicode Standard Annexes 15 (normalization), 24 (scripts) and 29 (word boundaries; the scripts it leaves to
dictionaries are those named above).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import regex

# Commas between tags: also the full-width, the ideographic and the Arabic one.
COMMAS = ",，、،"  # noqa: RUF001 - these very characters are meant

# Scripts without blanks between words, in which any two syllables may be parts of two words.
_SOLID = r"\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
# Runs of these are one word: U+30FC is the mark of a long vowel, U+FF70 its half-width form.
_KATAKANA = r"\p{Katakana}\u30fc\uff70"
_LETTERS_WITH_BLANKS = rf"[\p{{L}}\p{{N}}_--{_SOLID}{_KATAKANA}\p{{Hangul}}]"
# What belongs to the character before it, in any script: marks, joiners, signs of repetition and of a long vowel, and
# the vowels of Thai and Lao that stand behind their consonant.
_CONTINUES = (
    r"[\p{M}\u200c\u200d\u3005\u309d\u309e\u30fd\u30fe\u30fc\uff70"
    r"\u0e30\u0e32\u0e33\u0e45\u0e46\u0eb0\u0eb2\u0eb3\u0ec6]"
)
# Vowels of Thai and Lao that stand before the consonant they belong to.
_LEADS = r"[\u0e40-\u0e44\u0ec0-\u0ec4]"
# Blanks that are one for tokenizers, and what editors and keyboards write for each other: typographic apostrophes,
# hyphens that break no line.
_ALIKE = {" ": r"\s+"} | {
    each: f"[{regex.escape(alike)}]"
    for alike in ("'\u2019\u02bc\uff07", "-\u2010\u2011\uff0d")
    for each in alike
}
# Particles, titles and forms of "to be" that Korean writes onto a noun; several may follow each other.
_PARTICLES = """
이 가 은 는 을 를 의 와 과 도 만 에 에서 에게 에게서 한테 께 께서 로 으로 로서 으로서 랑 이랑 하고 보다 처럼 같이 까지
부터 마다 조차 밖에 나 이나 야 아 여 이여 들 씨 님 군 양 쪽 마저 대로 라고 이라고 라는 이라는 라면 이라면
인 이다 다 입니다 이에요 예요 이고 고 이며 며 였다 이었다 였던 이었던
"""


@lru_cache(maxsize=256)
def whole_word(word: str) -> regex.Pattern[str]:
    """Return a pattern that finds a word where it stands as a word of its own, in any case and composition.

    Blanks inside it are found as any blanks, as tokenizers take them: two, or the end of a line. An empty word is
    found nowhere.
    """
    composed = unicodedata.normalize("NFC", " ".join(word.split()))
    if not composed:
        return regex.compile(r"(?!)")
    clusters = regex.findall(r"\X", composed)
    spelled = "".join(_ALIKE.get(cluster) or _in_any_composition(cluster) for cluster in clusters)
    return regex.compile(
        _before(clusters[0][0]) + spelled + _after(clusters[-1][0]),
        regex.IGNORECASE | regex.VERSION1,
    )


def holds_word(text: str, word: str) -> bool:
    """Say whether a word stands in a text as a word of its own."""
    return whole_word(word).search(text) is not None


def replaced(text: str, part: str, by: str) -> str:
    """Return a text with `part` replaced wherever it stands, in any Unicode composition but in this case only."""
    if text.isascii() and part.isascii():
        return text.replace(part, by)
    clusters = regex.findall(r"\X", unicodedata.normalize("NFC", part))
    return str(regex.sub("".join(map(_in_any_composition, clusters)), lambda _: by, text))


def _in_any_composition(cluster: str) -> str:
    """Return a pattern of one character with its marks, composed, decomposed or half of both."""
    apart = unicodedata.normalize("NFD", cluster)
    ends = range(1, len(apart) + 1)
    spellings = {unicodedata.normalize("NFC", apart[:end]) + apart[end:] for end in ends}
    choices = "|".join(map(regex.escape, sorted(spellings | {apart}, key=len, reverse=True)))
    return f"(?:{choices})"


def _before(first: str) -> str:
    """Return what must not stand before a word that begins with `first`."""
    if regex.match(rf"[{_KATAKANA}]", first):
        return rf"(?<![{_KATAKANA}])"
    if regex.match(rf"[{_SOLID}]", first):
        return rf"(?<!{_LEADS})"
    if regex.match(r"\p{Hangul}", first):
        return r"(?<![\p{Hangul}\p{N}_]\p{M}*)"
    # A word of marks such as <zib> or [V] has its ends in itself.
    return rf"(?<!{_LETTERS_WITH_BLANKS}\p{{M}}*)" if regex.match(r"[\p{L}\p{N}_]", first) else ""


def _after(last: str) -> str:
    """Return what must not stand behind a word that ends with `last`."""
    end = rf"(?!{_CONTINUES})"
    if regex.match(rf"[{_KATAKANA}]", last):
        return end + rf"(?![{_KATAKANA}])"
    if regex.match(rf"[{_SOLID}]", last):
        return end
    if regex.match(r"\p{Hangul}", last):
        return end + rf"(?={_particles()}{{0,3}}+(?![\p{{Hangul}}\p{{N}}_]))"
    if regex.match(r"[\p{L}\p{N}_]", last):
        return end + rf"(?!{_LETTERS_WITH_BLANKS})"
    return end


@lru_cache(maxsize=1)
def _particles() -> str:
    longest_first = sorted(_PARTICLES.split(), key=len, reverse=True)
    return f"(?:{'|'.join(''.join(map(_in_any_composition, one)) for one in longest_first)})"


_RUNS = regex.compile(
    rf"(?P<solid>[{_SOLID}][{_SOLID}\p{{M}}\u3005]*)|[{_KATAKANA}]+|(?:{_LETTERS_WITH_BLANKS}|\p{{Hangul}}|\p{{M}})+",
    regex.VERSION1,
)


_ASCII_WORDS = regex.compile(r"\w+", regex.ASCII)


def words_in(text: str) -> Iterator[str]:
    """Yield the words of a text, casefolded; of scripts without blanks every two characters that follow each other.

    Which of their characters are words only a dictionary knows; most words of Chinese have two.
    """
    if text.isascii():  # the same in less time: all captions of a dataset are looked at
        yield from _ASCII_WORDS.findall(text.casefold())
        return
    composed = unicodedata.normalize("NFC", text).casefold()
    for run in _RUNS.finditer(composed):
        if run["solid"] is None:
            yield run[0]
            continue
        clusters = regex.findall(r"\X", run[0])
        yield from (
            map("".join, zip(clusters, clusters[1:], strict=False)) if clusters[1:] else clusters
        )


def same_word(word: str) -> str:
    """Return the form in which words and tags that differ only in case or Unicode composition are equal."""
    return unicodedata.normalize("NFC", word.strip()).casefold()


def tags_of(caption: str) -> list[str]:
    """Return the tags of a caption, which stand between commas, in order."""
    return [tag for tag in map(str.strip, regex.split(rf"[{COMMAS}]", caption)) if tag]
