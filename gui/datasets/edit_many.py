"""One edit of many captions: putting words in front or at the end, replacing, removing a tag.

Pure text: inputs are captions, outputs captions. Tags are what stands between commas. A caption in JSON stays one: its
first text gets what is put in front or at the end, its texts are searched, and it has no tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.common.whole_words import replaced, same_word, tags_of, whole_word
from lora_trainer.dataset.caption_rules import TRIGGER_PLACEHOLDER, with_trigger
from lora_trainer.dataset.captions import compact, json_object
from lora_trainer.dataset.json_captions import with_each_text, with_first_text, with_word_inside

Kind = Literal["prepend", "append", "replace", "remove_tag", "trigger"]
Joint = Literal[", ", " ", ""]
MAX_TEXT_CHARACTERS = 2_000
MAX_TRIGGER_CHARACTERS = 100
"""As many as data.trigger may have."""


@dataclass(frozen=True, kw_only=True)
class EditMany:
    """What to do to each caption; `joint` stands between what is added and what was there."""

    kind: Kind
    text: str
    replacement: str = ""
    joint: str = ", "

    def __post_init__(self) -> None:
        if not self.text.strip() and not (self.kind == "replace" and self.text):
            raise RequestError("nothing is typed", fix="type the words that this is about")
        if self.kind == "trigger" and len(self.text.strip()) > MAX_TRIGGER_CHARACTERS:
            raise RequestError(
                f"a trigger word has at most {MAX_TRIGGER_CHARACTERS} characters, not {len(self.text.strip())}",
                fix="choose a short, rare word",
            )

    @property
    def adds(self) -> bool:
        """Whether it adds words, so that a caption which it leaves alone has them."""
        return self.kind in ("prepend", "append", "trigger")

    def apply(self, caption: str) -> str:
        """Return the caption as it becomes."""
        if (value := json_object(caption)) is not None:
            return self._within(value, caption)
        match self.kind:
            case "prepend" | "append":
                return self._joined(caption)
            case "replace":
                return replaced(caption, self.text, self.replacement)
            case "remove_tag":
                return without_tag(caption, self.text)
            case "trigger":
                return with_trigger(caption, self.text)

    def _joined(self, text: str) -> str:
        """Return a text with the words in front or at the end; one that has them there, or as a tag, as it is."""
        words = whole_word(self.text)
        has_tag = same_word(self.text) in map(same_word, tags_of(text))
        if self.joint == ", " and has_tag:
            return text
        if self.kind == "prepend":
            begins = words.match(text.lstrip()) is not None
            return text if begins else self.joint.join(filter(None, (self.text, text)))
        ends = any(found.end() == len(text.rstrip()) for found in words.finditer(text))
        return text if ends else self.joint.join(filter(None, (text, self.text)))

    def _within(self, value: Mapping[str, Any], caption: str) -> str:
        """Return a caption in JSON as it becomes, laid out as it was; as it is where nothing in it changes."""
        match self.kind:
            case "prepend" | "append":
                changed = with_first_text(value, self._joined)
            case "replace":
                changed = with_each_text(
                    value, lambda text: replaced(text, self.text, self.replacement)
                )
            case "remove_tag":
                return caption
            case "trigger":
                word = self.text.strip()
                named = with_word_inside(value, word, placeholder=TRIGGER_PLACEHOLDER)
                changed = json.loads(named)
        if changed == value:
            return caption
        lines = "\n" in caption.strip()
        return json.dumps(changed, ensure_ascii=False, indent=2) if lines else compact(changed)

    def title(self) -> str:
        """Return what the undo button calls it."""
        what = f"\u201c{self.text[:40]}\u201d"
        return {
            "prepend": f"put {what} in front",
            "append": f"put {what} at the end",
            "replace": f"replace {what}",
            "remove_tag": f"remove the tag {what}",
            "trigger": f"set the trigger {what}",
        }[self.kind]


def without_tag(caption: str, tag: str) -> str:
    """Return a caption without a tag, in any case; one that lacks it stays as it is to the letter."""
    unwanted = same_word(tag)
    tags = tags_of(caption)
    kept = [found for found in tags if same_word(found) != unwanted]
    return caption if len(kept) == len(tags) else ", ".join(kept)
