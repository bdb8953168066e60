"""The templates of the pages, which lie beside what they show: `queue/page.html`, `shared/bar.html`.

Input: the name of a template, the language of the reader and what the template shows. Output: markup in which every
text is escaped. In a template `_("Put back {}", name)` says a text in the language of the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lora_trainer.common.wording import bytes_text, duration_text
from lora_trainer.reporting.charts import Html, text

from .translation import Words

_FOLDER = Path(__file__).parents[1]


class _EntriesFirst(Environment):
    """In `each.keys` the entry "keys" of a mapping is meant, and not the method of the same name."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


@cache
def _environment() -> Environment:
    environment = _EntriesFirst(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=text,  # and what turns the direction of others is replaced
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": bytes_text, "duration": duration_text, "message": _message}
    return environment


def _message(english: str, words: Words) -> str:
    """Return a text that was put together elsewhere in the language of the reader, as `_.message` does."""
    return words.message(english)


def render(template: str, words: Words, **shown: object) -> Html:
    """Return the markup of a template."""
    return Html(_environment().get_template(template).render(_=words, **shown))
