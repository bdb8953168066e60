"""The words a user chooses by: speed, balanced or quality; person, style or object.

The priorities of presets: speed, balanced or quality.

Presets by kind of subject (person, style, object), each with its reason.

They change only settings for which the kind of image itself is a reason; docs/concepts.md explains which
settings stay equal and why. Input is the value of `train.concept`, output the settings laid over a preset
and a factor on the views of each image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Priority = Literal["speed", "balanced", "quality"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


Concept = Literal["any", "person", "style", "object"]
CONCEPT = "train.concept"

_BY_NAME = "the subject should appear with its words and not without them"
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
        "data.flip": (True, "a mirrored image has the same style"),
        "data.caption_dropout": (0.1, "a style should appear with any words"),
    },
}
PROMPTS: Mapping[str, tuple[str, ...]] = {
    "any": ("{}", "{}, outdoors in sunlight", "{}, close-up", "{}, at night"),
    "person": (
        "{}, portrait, looking at the camera",
        "{}, standing in a city street, full body",
        "{}, sitting at a table, side view",
        "{}, smiling, in a garden",
    ),
    "object": (
        "{}, on a plain white background",
        "{}, on a wooden table",
        "{}, outdoors in sunlight",
        "{}, close-up from the side",
    ),
    "style": (
        "{}, portrait of a woman",
        "{}, a city street at night",
        "{}, mountains behind a lake",
        "{}, a cat on a chair",
    ),
}
"""Sample prompts for images without captions; `{}` stands for the trigger or the class word."""
VIEWS: Mapping[str, float] = {"style": 0.5}
"""Factor on `train.views`: a style is common to many images, and repeating an image too often teaches the
image itself."""
