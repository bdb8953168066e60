"""The JSON captions of Ideogram 4: what is wrong with one, and how a vision-language model is asked for one.

The form is that of Ideogram's prompting guide (github.com/ideogram-oss/ideogram4, docs/prompting.md), as the caption
checkers of ai-toolkit and SimpleTuner have it. Models are asked for boxes as they were trained to give them, from left
to right first (Qwen3-VL: in thousandths of the image); Ideogram's are from top to bottom first. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.families.base.texts import JsonCaptions

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


# ---- captions that models write

REQUEST = """\
Describe this image as one JSON object, for training an image generator. Write the object alone, without a remark. \
Describe only what can be seen. Its form is:
{"high_level_description": "one sentence of at most 50 words: subject, what it does, setting, kind of image",
"style_description": {"aesthetics": "mood in a few words", "lighting": "direction, quality and colour of the light", \
"photo": "lens, framing, grain, focus", "medium": "photograph", "color_palette": ["#RRGGBB"]},
"compositional_deconstruction": {"background": "what is behind the subjects, in one or two sentences",
"elements": [{"type": "obj", "bbox": [x1, y1, x2, y2], "desc": "what it is, colours, clothes, pose, 20 to 50 words"},
{"type": "text", "bbox": [x1, y1, x2, y2], "text": "LETTERS AS WRITTEN", "desc": "typeface, colour, surface"}]}}
An image that is not a photograph has "art_style", the technique, in place of "photo", and as medium "illustration", \
"3d_render", "painting" or "graphic_design". "color_palette" has the image's main colours, at most 16, the largest \
first. Each person, animal or thing in front is one element of type "obj", each piece of writing one of type "text"; \
without any, "elements" is []. Boxes are whole numbers from 0 to 1000, left, top, right and bottom; leave "bbox" out \
where a thing has no clear edges."""
_STYLE = ("aesthetics", "lighting", "photo", "medium", "art_style", "color_palette")
_ELEMENT = ("type", "bbox", "text", "desc", "color_palette")


def from_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known parts of a model's answer in the guide's order, with boxes from top to bottom first.

    Colours become capitals, numbers of boxes whole ones within the image. Boxes and palettes that cannot be read are
    left out: both may be missing.
    """
    caption = {part: answer[part] for part in PARTS if part in answer}
    style, layout = caption.get(PARTS[1]), caption.get(PARTS[2])
    if isinstance(style, Mapping):
        caption[PARTS[1]] = _style_in_order(style)
    if isinstance(layout, Mapping):
        elements = layout.get("elements", [])
        caption[PARTS[2]] = {
            **({"background": layout["background"]} if "background" in layout else {}),
            "elements": [_element_in_order(each) for each in elements]
            if isinstance(elements, list)
            else elements,
        }
    return caption


def _style_in_order(style: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: style[key] for key in _STYLE if style.get(key) not in (None, "", [])}
    if "photo" in known and "art_style" in known:  # the medium says which of the two is meant
        del known["art_style" if known.get("medium") == "photograph" else "photo"]
    return _with_colours(known, most=IMAGE_COLOURS)


def _element_in_order(element: Any) -> Any:
    if not isinstance(element, Mapping):
        return element
    known = {key: element[key] for key in _ELEMENT if element.get(key) is not None}
    if known.get("type") != "text":
        known.pop("text", None)
    if (box := _turned(known.pop("bbox", None))) is not None:
        known = {
            key: box if key == "bbox" else known[key] for key in _ELEMENT if key in (*known, "bbox")
        }
    return _with_colours(known, most=ELEMENT_COLOURS)


def _turned(box: Any) -> list[int] | None:
    """Return [top, left, bottom, right] of a box [left, top, right, bottom], None where it encloses nothing."""
    if not isinstance(box, list) or len(box) != 4:
        return None
    if not all(isinstance(side, int | float) and math.isfinite(side) for side in box):
        return None
    left, top, right, bottom = (min(1000, max(0, round(side))) for side in box)
    (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
    return [top, left, bottom, right] if left < right and top < bottom else None


def _with_colours(part: dict[str, Any], *, most: int) -> dict[str, Any]:
    """Return a part with the colours of its palette that can be read, in capitals and each once."""
    colours = part.pop("color_palette", None)
    if not isinstance(colours, list):
        return part
    read = (each.strip().upper() for each in colours if isinstance(each, str))
    kept = list(dict.fromkeys(each for each in read if _COLOUR.fullmatch(each)))[:most]
    return {**part, "color_palette": kept} if kept else part


JSON_CAPTIONS = JsonCaptions(faults=caption_faults, request=REQUEST, from_answer=from_answer)
