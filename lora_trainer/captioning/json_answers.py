"""Captions in JSON that a model wrote: the object within its answer, put into a family's form and checked by its rule.

Input is an answer as it was decoded, output the caption on one line, or the reason why it is not one. An answer that is
not a caption of the family is never written.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lora_trainer import families
from lora_trainer.common.errors import RequestError, did_you_mean
from lora_trainer.dataset.caption_rules import TRIGGER_PLACEHOLDER
from lora_trainer.dataset.captions import MAX_CAPTION_CHARACTERS
from lora_trainer.dataset.json_captions import with_word_inside
from lora_trainer.families.base.texts import JsonCaptions

# Tokens of an answer: a description of each thing in the image takes 1000 to 2000.
MAX_TOKENS = 3072
# A comma before the end of a list or an object, which JSON does not have.
_SPARE_COMMA = re.compile(r",(\s*[}\]])")


class NotACaption(ValueError):
    """An answer that is not a caption of the family; the message says why."""


def form_of(family: str) -> JsonCaptions:
    """Return the form of a family's captions in JSON; raises RequestError for a family without one."""
    form = families.family(family).text.json_captions if family in families.NAMES else None
    if form is not None:
        return form
    having = [name for name in families.NAMES if families.family(name).text.json_captions]
    raise RequestError(
        f"--json-for {family} is not a family that is trained with captions in JSON."
        f"{did_you_mean(family, having)}",
        fix=f"give {' or '.join(having)}, or leave --json-for out",
    )


def caption_in(answer: str, form: JsonCaptions, *, trigger: str | None) -> str:
    """Return the caption in an answer, on one line with the trigger inside; raises NotACaption."""
    value = form.from_answer(_object_in(answer))
    if faults := list(form.faults(value)):
        more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
        raise NotACaption(f"is in another form: {faults[0]}{more}")
    text = with_word_inside(value, (trigger or "").strip(), placeholder=TRIGGER_PLACEHOLDER)
    if len(text) > MAX_CAPTION_CHARACTERS:
        raise NotACaption(
            f"has {len(text):,} characters, at most {MAX_CAPTION_CHARACTERS:,} are read"
        )
    return text


def _object_in(answer: str) -> dict[str, Any]:
    """Return the first object of an answer, with or without a fence and words around it; raises NotACaption."""
    start = answer.find("{")
    if start < 0:
        raise NotACaption("has no JSON object")
    text = answer[start:]
    # A line break within a text is read as one; the rule for commas is tried where it does not read without.
    decoder = json.JSONDecoder(strict=False)
    for candidate in (text, _SPARE_COMMA.sub(r"\1", text)):
        try:
            value, _ = decoder.raw_decode(candidate)
        except (ValueError, RecursionError) as error:
            problem = error
            continue
        if isinstance(value, dict):
            return value
    raise NotACaption(f"has JSON that breaks ({problem})")
