"""What a LoRA is to learn, a person, a style or an object, and which presets that changes, each with its reason.

Only differences that follow from what such pictures are; docs/concepts.md says what was left alone and why.
Input is the word of `train.concept`, output settings over a preset and the views of each picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Concept = Literal["any", "person", "style", "object"]
CONCEPT = "train.concept"

_BY_NAME = "it should come when its words are there, not without them"
SETTINGS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "any": {},
    "person": {
        "data.flip": (False, "faces are not symmetric"),
        "data.caption_dropout": (0.0, _BY_NAME),
    },
    "object": {
        "data.flip": (False, "lettering and handed shapes would be learned mirrored"),
        "data.caption_dropout": (0.0, _BY_NAME),
    },
    "style": {
        "data.flip": (True, "a mirrored picture has the same style"),
        "data.caption_dropout": (0.1, "a style should show whatever the words are"),
    },
}
VIEWS: Mapping[str, float] = {"style": 0.5}
"""Factor on how often each picture is seen: a style is what many pictures have in common, and pictures
that are seen again and again are learned themselves."""
