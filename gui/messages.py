"""What a command said, on a page: settings by their labels, code as code, in the language of the reader."""

from __future__ import annotations

from lora_trainer.reporting.charts import Html

from .markup import capital, inline, plain, tag
from .server.translation import Words


def message(text: str, said: Words) -> Html:
    """Return a message in the language of the reader; one that the language does not know keeps its code."""
    told = said.message(plain(text))
    return inline(text if told == plain(text) else told)


def sentence(text: str, said: Words) -> Html:
    """Return a message as a sentence of its own, without its full stop."""
    return Html(capital(message(text, said)))


def error(line: str, said: Words) -> Html:
    """Return a refusal."""
    return tag("p", message(line, said), class_="error notice")
