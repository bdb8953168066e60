"""The JSON captions of Ideogram 4: what is wrong with one.

The form is that of Ideogram's prompting guide (github.com/ideogram-oss/ideogram4, docs/prompting.md), as the caption
checkers of ai-toolkit and SimpleTuner have it. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

PARTS = ("high_level_description", "style_description", "compositional_deconstruction")
_COLOUR = re.compile(r"#[0-9A-F]{6}")
# Most colours of an image and of one of its elements.
IMAGE_COLOURS, ELEMENT_COLOURS = 16, 5


def caption_faults(caption: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the form that the release was trained with, what is missing first."""
    layout, style = (caption.get(part) for part in (PARTS[2], PARTS[1]))
    if not isinstance(layout, dict):
        yield f"{PARTS[2]} is missing, an object with background and elements"
    else:
        if not isinstance(layout.get("background"), str):
            yield f"{PARTS[2]}.background is missing, a text"
        elements = layout.get("elements")
        if not isinstance(elements, list):
            yield f"{PARTS[2]}.elements is missing, a list"
        for number, element in enumerate(elements if isinstance(elements, list) else ()):
            yield from _element_faults(element, f"elements[{number}]")
    if unknown := [key for key in caption if key not in PARTS]:
        yield f"unknown are {', '.join(unknown)[:80]}; known are {', '.join(PARTS)}"
    if style is not None:
        yield from _style_faults(style)


def _style_faults(style: Any) -> Iterator[str]:
    if not isinstance(style, dict):
        yield f"{PARTS[1]} is not an object"
        return
    if ("photo" in style) == ("art_style" in style):
        yield f"{PARTS[1]} needs photo or art_style, one of the two"
    yield from _colour_faults(style, PARTS[1], most=IMAGE_COLOURS)


def _element_faults(element: Any, name: str) -> Iterator[str]:
    if not isinstance(element, dict) or element.get("type") not in ("obj", "text"):
        yield f"{name} needs the type obj or text"
        return
    if element["type"] == "text" and not isinstance(element.get("text"), str):
        yield f"{name}.text is missing"
    if not isinstance(element.get("desc"), str):
        yield f"{name}.desc is missing"
    if "bbox" in element and not _is_box(element["bbox"]):
        yield f"{name}.bbox is not [top, left, bottom, right] in whole numbers from 0 to 1000"
    yield from _colour_faults(element, name, most=ELEMENT_COLOURS)


def _is_box(box: Any) -> bool:
    if not isinstance(box, list) or len(box) != 4 or not all(type(side) is int for side in box):
        return False
    top, left, bottom, right = map(int, box)
    return 0 <= top <= bottom <= 1000 and 0 <= left <= right <= 1000


def _colour_faults(part: Mapping[str, Any], name: str, *, most: int) -> Iterator[str]:
    colours = part.get("color_palette")
    if colours is None:
        return
    are_colours = isinstance(colours, list) and all(
        isinstance(each, str) and _COLOUR.fullmatch(each) for each in colours
    )
    if not are_colours or len(colours) > most:
        yield f"{name}.color_palette is not a list of at most {most} colours like #1B3A5C, in capitals"
