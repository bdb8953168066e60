"""What is answered about a dataset, in the language of the reader: sentences only, neither names nor captions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..server.translation import Words, words

# By their keys: a sentence, a list of sentences, a list of cards.
_SENTENCES = frozenset({"error", "problem", "redo", "said", "step", "trained_as", "undo", "used"})
_LISTS = frozenset({"instead", "left", "problems"})
_CARDS = frozenset({"cards", "excluded", "pictures"})


def in_language(answer: Mapping[str, Any], _: Words) -> dict[str, Any]:
    """Return an answer of `api` in a language."""
    return (
        {key: _spoken(key, value, _.code) for key, value in answer.items()}
        if _.texts
        else {**answer}
    )


def _spoken(key: str, value: Any, code: str) -> Any:
    if key in _SENTENCES:
        return _message(code, value)
    if key in _LISTS:
        return [_message(code, sentence) for sentence in value]
    if key in _CARDS:
        return [_card(card, code) for card in value]
    match key:
        case "check":
            told = {part: _message(code, value[part]) for part in ("error", "verdict")}
            return {**value, **told}
        case "models":
            spoken = ("good_for", "takes", "offered_for")
            return [
                {**model, **{part: _message(code, model[part]) for part in spoken}}
                for model in value
            ]
        case "seen":
            return [{**crop, "said": _message(code, crop["said"])} for crop in value]
    return value


def _card(card: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Return a card; the kind of a badge stays, a page filters by it."""
    badges = [
        {**badge, "text": _message(code, badge["text"]), "title": _message(code, badge["title"])}
        for badge in card["badges"]
    ]
    return {**card, "badges": badges}


@lru_cache(maxsize=50_000)  # thousands of cards say the same few sentences
def _message(code: str, english: str) -> str:
    return words(code).message(english)
