"""The texts of the pages in the language of whoever reads them.

Input: languages/CODE.json, which holds for each English text its translation. `{}` stands for a value that stays as
it is (a name), `{#}` for a figure with its unit, `{text}` for a value that is a text of its own. Outputs: `Words`,
with which templates say `_("Put back {}", name)`; a text that a language does not know stays English.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from . import language

_PLACEHOLDER = re.compile(r"\{(?:text|#)?\}")
_FIGURE = r"(\d[^A-Za-z]*?(?:(?:[KMG]iB|B|days|h|min|ms|px|s|e-?\d+)\b[^A-Za-z]*?)*)"


@dataclass(frozen=True)
class Words:
    """The texts of one language by their English texts; none for English itself."""

    code: str
    texts: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, english: str, *values: object) -> str:
        """Return a text of the pages with its placeholders filled in order."""
        left = iter(values)
        text = self.texts.get(english, english)
        return _PLACEHOLDER.sub(lambda _: str(next(left)), text) if values else text

    def message(self, english: str) -> str:
        """Return a text that was put together elsewhere, such as what a training says of itself.

        Of several entries that fit, the one with the most letters counts.
        """
        if not self.texts:
            return english
        text = " ".join(english.split())
        if text in self.texts:
            return self.texts[text]
        for pattern in self._patterns:
            if found := pattern.form.fullmatch(text):
                return self._filled(pattern, found.groups())
        return english

    def _filled(self, pattern: _Pattern, values: tuple[str, ...]) -> str:
        said = [
            value if placeholder == "{}" else self.message(value)
            for placeholder, value in zip(pattern.placeholders, values, strict=True)
        ]
        return self(pattern.english, *said)

    @cached_property
    def _patterns(self) -> list[_Pattern]:
        with_values = [english for english in self.texts if _PLACEHOLDER.search(english)]
        return [_Pattern.of(english) for english in sorted(with_values, key=len, reverse=True)]


@dataclass(frozen=True)
class _Pattern:
    english: str
    form: re.Pattern[str]
    placeholders: tuple[str, ...]

    @classmethod
    def of(cls, english: str) -> _Pattern:
        placeholders = tuple(_PLACEHOLDER.findall(english))
        groups = [_FIGURE if found == "{#}" else "(.+?)" for found in placeholders]
        parts = [re.escape(part) for part in _PLACEHOLDER.split(english)]
        form = parts[0] + "".join(
            group + part for group, part in zip(groups, parts[1:], strict=True)
        )
        return cls(english=english, form=re.compile(form, re.DOTALL), placeholders=placeholders)


@cache
def words(code: str) -> Words:
    """Return the texts of a language by its code."""
    return Words(code, language.words(code) if code != language.ENGLISH else {})
