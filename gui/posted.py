"""What a page's script asks of the server: one JSON object, each of its values checked.

Input: the object as it came, from anybody. Outputs: texts, lists and choices; RequestError for
anything of another kind or length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lora_trainer.common.errors import RequestError

MAX_NAME_CHARACTERS = 4_096
MAX_NAMES = 100_000
T = TypeVar("T", bound=str)


@dataclass(frozen=True)
class Posted:
    """One request."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: object) -> Posted:
        """Check that it is an object at all."""
        if not isinstance(values, dict):
            raise _refusal("what was asked is no object")
        return cls(values)

    def text(self, name: str, *, at_most: int = MAX_NAME_CHARACTERS) -> str:
        """Return a text that can be written as UTF-8."""
        return _text(self.values.get(name), name, at_most)

    def texts(self, name: str, *, at_most: int = MAX_NAME_CHARACTERS) -> list[str]:
        """Return a list of texts, each once."""
        found = self.values.get(name)
        if not isinstance(found, list) or len(found) > MAX_NAMES:
            raise _refusal(f"{name} is no list of at most {MAX_NAMES} texts")
        return list(dict.fromkeys(_text(value, name, at_most) for value in found))

    def pairs(self, name: str, *, at_most: int) -> dict[str, str]:
        """Return texts by name."""
        found = self.values.get(name)
        if not isinstance(found, dict) or len(found) > MAX_NAMES:
            raise _refusal(f"{name} is no object of at most {MAX_NAMES} texts")
        return {
            _text(key, name, MAX_NAME_CHARACTERS): _text(value, name, at_most)
            for key, value in found.items()
        }

    def choice(self, name: str, allowed: Sequence[T]) -> T:
        """Return one of the allowed words."""
        found = self.values.get(name)
        for word in allowed:
            if found == word:
                return word
        raise _refusal(f"{name} is none of {', '.join(allowed)}")


def _text(value: object, name: str, at_most: int) -> str:
    if not isinstance(value, str):
        raise _refusal(f"{name} is no text")
    if len(value) > at_most:
        raise RequestError(
            f"{name} has {len(value):,} characters, at most {at_most:,} are taken", fix="shorten it"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refusal(f"{name} holds half a character") from None
    return value


def _refusal(what: str) -> RequestError:
    return RequestError(what, fix="load the page again")
