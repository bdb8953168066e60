"""The texts of the pages in the language of whoever reads them.

Input: languages/CODE.json, which holds for each English text its translation. `{}` stands for a value that stays as
it is (a name), `{#}` for a figure with its unit, `{text}` for a value that is a text of its own. Outputs: `Words`,
with which templates say `_("Put back {}", name)`; a text that a language does not know stays English.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from html import unescape

from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.charts import text as escaped_text

from . import language

_TAG = re.compile(r"(<[^>]*>)")
_OPENED = re.compile(r"<([A-Za-z][\w-]*)")
_SAID = re.compile(r' (title|aria-label|alt|placeholder)="([^"]*)"')
_KEPT = frozenset({"code", "pre", "kbd", "script", "style"})
_VOID = frozenset({"br", "hr", "img", "input", "meta"})
_PLACEHOLDER = re.compile(r"\{(?:text|#)?\}")
# A number with the separators of English; what has more points, such as a version, is none.
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]*[.,]\d)")
_DAYS, _IN_DAYS = "{#} days", re.compile(r"([\d.,]+) days\b")
_SAMPLE = "1,234.5"
_VALUE_WORDS = frozenset(
    {"on", "off", "none", "empty"}
)  # what `value_text` says of values that are not figures
_REMEMBERED = 4096
"""Messages of a language whose translation is kept: a page says a setting or a rate of the run again and again."""
_FIGURE = r"(\d[^A-Za-z]*?(?:(?:[KMG]iB|B|days|h|min|ms|px|s|e-?\d+)\b[^A-Za-z]*?)*)"
_MORE = re.compile(r" and (\d[\d,]*) more$")


@dataclass(frozen=True)
class Words:
    """The texts of one language by their English texts; none for English itself."""

    code: str
    texts: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, english: str, *values: object) -> str:
        """Return a text of the pages with its placeholders filled in order."""
        left = iter(values)
        text = self.texts.get(english, english)
        if not values:
            return text

        def fill(found: re.Match[str]) -> str:
            value = str(next(left))
            return self.figure(value) if found[0] == "{#}" else value

        return _PLACEHOLDER.sub(fill, text)

    def figure(self, written: str) -> str:
        """Return a figure with the separators of the language, which its word for `1,234.5` shows, and its units."""
        point, group = self._separators
        said = _NUMBER.sub(
            lambda found: found[0].translate({ord("."): point, ord(","): group}), written
        )
        days = self.texts.get(_DAYS, _DAYS)
        return _IN_DAYS.sub(lambda found: days.replace("{#}", found[1]), said)

    @cached_property
    def _separators(self) -> tuple[str, str]:
        shown = self.texts.get(_SAMPLE, _SAMPLE)
        return shown[-2], shown[1]

    def value(self, written: str) -> str:
        """Return the value of a setting, as `value_text` writes it; what somebody typed stays as it is."""
        if written in _VALUE_WORDS or re.fullmatch(_FIGURE, written):
            return self.message(written)
        return written

    def message(self, english: str) -> str:
        """Return a text that was put together elsewhere, such as what a training says of itself.

        Of several entries that fit, the one with the most letters counts that leaves less in English than it says.
        """
        return self._message(english) if self.texts else english

    @cached_property
    def _message(self) -> Callable[[str], str]:
        return lru_cache(maxsize=_REMEMBERED)(self._put_together)

    def _put_together(self, english: str) -> str:
        text = " ".join(english.split())
        if text in self.texts:
            return self.texts[text]
        what, is_refusal, fix = text.partition(". Fix: ")
        if is_refusal:
            halves = (what, fix.removesuffix("."))
            said, way = map(self.message, halves)
            # One half in another language than the other is worse than both in English.
            if said == what or way == halves[1]:
                return english
            return f"{said}. {self('Fix: {text}', way)}."
        fitting = (
            (pattern, found)
            for start in (text[:2], text[:1], "")
            for pattern in self._patterns.get(start, ())
            if pattern.longest_part in text and (found := pattern.form.fullmatch(text))
        )
        for pattern, found in sorted(fitting, key=lambda pair: -len(pair[0].english)):
            filled = self._filled(pattern, found.groups())
            if filled is not None:
                return filled
        return self.figure(english) if re.fullmatch(_FIGURE, text) else self._with_more(english)

    def _with_more(self, names: str) -> str:
        """Return names of files, as `events.named` puts them together, with the number of those left out."""
        return _MORE.sub(lambda found: " " + self("and {#} more", found[1]), names)

    def markup(self, html: str) -> Html:
        """Return markup of ours, in which no text has a bare angle bracket, with its texts as `message` says them.

        What is code, of the user (`translate="no"`) or English in every language (`lang="en"`) stays.
        """
        if not self.texts:
            return Html(html)
        kept = [False]  # of each element that is open
        said: list[str] = []
        for at, piece in enumerate(_TAG.split(html)):
            if at % 2 == 0:
                said.append(piece if kept[-1] else self._text(piece))
                continue
            opened = _OPENED.match(piece)
            stays = kept[-1] or opened is not None and _stays(opened[1], piece)
            said.append(piece if stays else _SAID.sub(self._attribute, piece))
            if opened is None:
                kept.pop()
            elif opened[1] not in _VOID:
                kept.append(stays)
        return Html("".join(said))

    def _attribute(self, found: re.Match[str]) -> str:
        return f' {found[1]}="{self._text(found[2])}"'

    def _text(self, escaped: str) -> str:
        """Return a piece of text of markup in the language, with the space around it."""
        english = escaped.strip()
        if not english:
            return escaped
        said = self.message(unescape(english))
        return escaped.replace(english, escaped_text(said), 1)

    def _filled(self, pattern: _Pattern, values: tuple[str, ...]) -> str | None:
        """Return an entry with its values, None where most of it would stay English: that is not a translation."""
        said, left = list[str](), 0
        for placeholder, value in zip(pattern.placeholders, values, strict=True):
            # A figure is said where it is put in; said twice, its point would be a point again.
            told = self.message(value) if placeholder == "{text}" else self._with_more(value)
            said.append(told)
            if placeholder == "{text}" and told == value:
                left += sum(map(str.isalpha, value))
        own = sum(map(str.isalpha, _PLACEHOLDER.sub("", pattern.english)))
        return None if left > own else self(pattern.english, *said)

    @cached_property
    def _patterns(self) -> Mapping[str, Sequence[_Pattern]]:
        """The texts with values, by the first two letters before the first value, by fewer where there are fewer."""
        found: dict[str, list[_Pattern]] = {}
        for english in self.texts:
            if _PLACEHOLDER.search(english):
                found.setdefault(_PLACEHOLDER.split(english)[0][:2], []).append(
                    _Pattern.of(english)
                )
        return found


@dataclass(frozen=True)
class _Pattern:
    english: str
    form: re.Pattern[str]
    placeholders: tuple[str, ...]
    longest_part: str
    """What stands between two values: to look for it takes a tenth of matching."""

    @classmethod
    def of(cls, english: str) -> _Pattern:
        placeholders = tuple(_PLACEHOLDER.findall(english))
        groups = [_FIGURE if found == "{#}" else "(.+?)" for found in placeholders]
        plain = _PLACEHOLDER.split(english)
        parts = [re.escape(part) for part in plain]
        form = parts[0] + "".join(
            group + part for group, part in zip(groups, parts[1:], strict=True)
        )
        return cls(
            english=english,
            form=re.compile(form, re.DOTALL),
            placeholders=placeholders,
            longest_part=max(plain, key=len),
        )


def _stays(element: str, tag: str) -> bool:
    """Whether the texts of an element are not said in another language."""
    return element in _KEPT or ' translate="no"' in tag or ' lang="en"' in tag


@cache
def words(code: str) -> Words:
    """Return the texts of a language by its code."""
    return Words(code, language.words(code) if code != language.ENGLISH else {})
