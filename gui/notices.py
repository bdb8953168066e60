"""Refusals and remarks as markup: a line that is there when there is something to say.

Inputs: sentences, which may quote what files of anybody say. Output: escaped markup.
"""

from __future__ import annotations

from lora_trainer.reporting.charts import Html, tag


def error_html(line: str) -> Html:
    """Return a refusal, an empty string for none."""
    return tag("p", line, class_="error notice") if line else Html("")


def note_html(line: str) -> Html:
    """Return a remark, an empty string for none."""
    return tag("p", line, class_="notice") if line else Html("")
