"""One edit of many captions: those in JSON stay in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lora_trainer.gui.datasets.edit_many import EditMany, Joint, Kind

CAPTION: dict[str, Any] = {
    "high_level_description": "a red bike",
    "style_description": {"photo": "obj, red film", "color_palette": ["#FF0000"]},
    "compositional_deconstruction": {
        "background": "a wall, {old}",
        "elements": [{"type": "obj", "bbox": [0, 1, 2, 3], "desc": 'a "red" obj'}],
    },
}
COMPACT = json.dumps(CAPTION, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("edit", "first"),
    [
        (EditMany(kind="prepend", text='"photo"'), '"photo", a red bike'),
        (EditMany(kind="append", text="at noon", joint=" "), "a red bike at noon"),
        (EditMany(kind="trigger", text="kezo"), "kezo, a red bike"),
        (EditMany(kind="trigger", text="bike"), "a red bike"),
        (EditMany(kind="remove_tag", text="a wall"), "a red bike"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_edit_acts_within_the_first_text(edit: EditMany, first: str) -> None:
    expected = {**CAPTION, "high_level_description": first}
    assert json.loads(edit.apply(COMPACT)) == expected
    laid_out = json.dumps(CAPTION, indent=2)
    after = edit.apply(laid_out)
    assert json.loads(after) == expected and "\n" in after
    assert (edit.apply(COMPACT) == COMPACT) == (first == "a red bike"), "else to the letter"


def test_words_are_replaced_in_texts_and_not_in_what_gives_them_form() -> None:
    edit = EditMany(kind="replace", text="red", replacement='"dark" green')
    value = json.loads(edit.apply(COMPACT))
    assert value["high_level_description"] == 'a "dark" green bike'
    (element,) = value["compositional_deconstruction"]["elements"]
    assert element["desc"] == 'a ""dark" green" obj' and element["bbox"] == [0, 1, 2, 3]
    renamed = json.loads(EditMany(kind="replace", text="obj", replacement="toy").apply(COMPACT))
    (element,) = renamed["compositional_deconstruction"]["elements"]
    assert (element["type"], element["desc"]) == ("obj", 'a "red" toy')
    assert renamed["style_description"]["photo"] == "toy, red film"
    same = EditMany(kind="replace", text="#FF0000", replacement="red").apply(COMPACT)
    assert same == COMPACT


def test_words_are_edited_as_ever() -> None:
    assert EditMany(kind="prepend", text="a").apply("{red|blue} bike") == "a, {red|blue} bike"


@pytest.mark.parametrize(
    ("kind", "joint", "caption", "after"),
    [
        ("prepend", ", ", "mukbot, a robot", "mukbot, a robot"),
        ("prepend", ", ", "a robot, Mukbot", "a robot, Mukbot"),
        ("prepend", " ", "MUKBOT is a robot", "MUKBOT is a robot"),
        ("prepend", ", ", "mukbots, a robot", "mukbot, mukbots, a robot"),
        ("prepend", ", ", "a robot like mukbot is", "mukbot, a robot like mukbot is"),
        ("append", ", ", "a robot like mukbot", "a robot like mukbot"),
        ("append", " ", "mukbot, a robot", "mukbot, a robot mukbot"),
        ("append", ", ", "mukbot, a robot", "mukbot, a robot"),
    ],
)
def test_words_that_stand_there_are_not_put_in_twice(
    kind: Kind, joint: Joint, caption: str, after: str
) -> None:
    assert EditMany(kind=kind, text="mukbot", joint=joint).apply(caption) == after
