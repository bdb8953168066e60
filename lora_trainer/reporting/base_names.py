"""The name of a base model as a report and the pages write it: `Stable Diffusion XL base 1.0`.

Input: how a run names its base: a Hub id, a path, a word for a miniature. Output: a name for people.
"""

from __future__ import annotations

import re

from lora_trainer.config.inputs import EMBEDDED, EMBEDDED_EDIT

_CAPITALS = {"xl": "XL", "base": "base", "medium": "medium", "large": "large"}


def title(source: str) -> str:
    """Return the name of a base as texts have it; files and ids in capitals stand as their makers wrote them."""
    if source == EMBEDDED:
        return "Miniature"
    if source == EMBEDDED_EDIT:
        return "Miniature that edits"
    name = source.rpartition("/")[2]
    for ending in (".safetensors", ".ckpt"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    if name != name.lower():
        return name
    name = re.sub(r"\bv?(\d)-(\d)", r"\1.\2", name.removesuffix("-diffusers"))
    return " ".join(_CAPITALS.get(word, word.capitalize()) for word in name.split("-"))
