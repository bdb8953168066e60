"""Edits of many captions are what their names say, and leave alone what they are not about."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui.bulk import KINDS, BulkEdit, tags_of, without_tag

from lora_trainer.common.errors import RequestError


@pytest.mark.parametrize(
    ("kind", "values", "before", "after"),
    [
        ("prepend", {}, "a cat", "word, a cat"),
        ("prepend", {"joint": " "}, "a cat", "word a cat"),
        ("prepend", {"joint": ""}, "a cat", "worda cat"),
        ("prepend", {}, "", "word"),
        ("append", {}, "a cat", "a cat, word"),
        ("append", {}, "", "word"),
        ("replace", {"replacement": "dog"}, "word, sword", "dog, sdog"),
        ("replace", {"replacement": ""}, "a word.", "a ."),
        ("replace", {"replacement": "$1 \\1"}, "word", "$1 \\1"),
        ("remove_tag", {}, "a cat,  WORD ,big, word", "a cat, big"),
        ("remove_tag", {}, "a cat,  sword ,big", "a cat,  sword ,big"),
        ("remove_tag", {}, "word", ""),
        ("trigger", {}, "a cat", "word, a cat"),
        ("trigger", {}, "a Word of a cat", "a Word of a cat"),
        ("trigger", {}, "a [trigger] cat", "a word cat"),
    ],
)
def test_an_edit(kind: Any, values: dict[str, Any], before: str, after: str) -> None:
    assert BulkEdit(kind=kind, text="word", **values).apply(before) == after


@pytest.mark.parametrize("kind", KINDS)
def test_no_words_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match="nothing is typed"):
        BulkEdit(kind=kind, text="")


def test_a_space_can_be_replaced() -> None:
    assert BulkEdit(kind="replace", text="  ", replacement=" ").apply("a  b") == "a b"


@given(caption=st.text(), tag=st.text())
def test_a_removed_tag_is_gone_and_the_others_stay(caption: str, tag: str) -> None:
    before, after = tags_of(caption), tags_of(without_tag(caption, tag))
    wanted = [found for found in before if found.casefold() != tag.strip().casefold()]
    assert after == wanted
