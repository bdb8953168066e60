"""Captions that are JSON objects, as some bases are trained with: read whole, never taken for tags, and checked.

A caption file whose text is one JSON object is that object on one line, without spaces between its parts and with
letters as they are (`compact`), whatever the base. What a family expects of such an object is a trait of its texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.common.events import Finding
from lora_trainer.common.whole_words import holds_word
from lora_trainer.dataset.captions import compact, json_object
from lora_trainer.dataset.records import ImageRecord, finding, finding_of_all
from lora_trainer.families.base.family import Family


def with_word_inside(value: Mapping[str, Any], word: str, *, placeholder: str) -> str:
    """Return an object with `word` in place of `placeholder`, else before its first text unless it has the word.

    Of an object without a text, such as `{}`, the word stands before the whole: else it would not be trained.
    """
    text = compact(value)
    if not word:
        return text
    escaped = json.dumps(word, ensure_ascii=False)[1:-1]
    if placeholder in text:
        return text.replace(placeholder, escaped)
    if holds_word(text, word):
        return text
    changed, has_text = _changed_first(value, lambda text: f"{word}, {text}" if text else word)
    return compact(changed) if has_text else f"{word}, {text}"


def _changed_first(value: Any, change: Callable[[str], str]) -> tuple[Any, bool]:
    """Return a value with its first text changed, and whether there is one."""
    if isinstance(value, str):
        return change(value), True
    if isinstance(value, Mapping):
        entries, is_in = dict(value), False
        for key, each in value.items():
            if not is_in:
                entries[key], is_in = _changed_first(each, change)
        return entries, is_in
    return value, False  # no list: its texts are types and colours


def with_first_text(value: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return an object whose first text is changed, the description of the whole."""
    return dict(_changed_first(value, change)[0])


def with_each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value whose texts are changed: no keys, no `type` of an element, and no colours, which lists hold."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key: each if key == "type" else with_each_text(each, change)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [each if isinstance(each, str) else with_each_text(each, change) for each in value]
    return value


def json_findings(records: Sequence[ImageRecord], *, family: Family) -> Iterator[Finding]:
    """Yield what a base that expects JSON will not understand of the captions; nothing for other bases."""
    form = family.text.json_captions
    if form is None:
        return
    plain: list[str] = []
    for record in records:
        for text in filter(None, record.written):
            value = json_object(text)
            if value is None and text.startswith("{"):
                source, place = _broken_at(record, text)
                yield finding("caption-broken-json", source, place=place)
            elif value is None:
                plain.append(record.name)
            elif faults := list(form.faults(value)):
                source = record.caption_source or record.name
                more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
                yield finding("caption-json-schema", source, fault=faults[0] + more)
    yield from finding_of_all("caption-not-json", list(dict.fromkeys(plain)))


def _broken_at(record: ImageRecord, text: str) -> tuple[str, str]:
    """Return where a caption is from and where its JSON breaks: the line of its file, else the character."""
    source = record.caption_source or record.name
    try:
        json.loads(Path(record.file).with_name(Path(source).name).read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        return source, f"line {error.lineno}, column {error.colno}: {error.msg}"
    except (OSError, ValueError, RecursionError):
        pass
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return source, f"character {error.pos + 1}: {error.msg}"
    except (ValueError, RecursionError) as error:
        return source, str(error)
    return source, "it is not an object"
