"""Choices and weights written in captions: what they mean, and that nothing written breaks them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common import caption_markup as markup

marked = st.text(alphabet="ab ,|{}()[]:.12\\\u732b", max_size=60)


def last(count: int, place: int) -> int:
    return count - 1


def test_choices_and_their_places() -> None:
    for text, chosen in (
        ("{{a|b}|c}", "c"),
        ("{x {a|b}}", "{x b}"),
        ("a|b} {c|d}", "a|b} d"),
        ("{a|{b|c}", "{a|c"),
        (r"\{a\|b\} {c\|d|e\}}", "{a|b} e}"),
        (r"a\(b\) {\\|c}", r"a\(b\) c"),
    ):
        assert markup.with_choices_made(text, last) == chosen
        assert markup.has_choice(text)
    assert not any(map(markup.has_choice, ("{a} {b|", r"\{a|b}", "{a|b")))
    asked = []

    def choose(count: int, place: int) -> int:
        asked.append((count, place))
        return 0

    assert markup.with_choices_made("x{a|{b|c}|d}", choose) == "xa"
    assert asked == [(2, 4), (3, 1)], "where each opens"


def test_weights() -> None:
    for text, parts in (
        ("a (red) hat", [("a ", 1.0), ("red", 1.1), (" hat", 1.0)]),
        ("((a))", [("a", 1.21)]),
        ("[a]", [("a", 1 / 1.1)]),
        ("(a (b:2) c: 0.5 )", [("a ", 0.5), ("b", 1.0), (" c", 0.5)]),
        ("(a:0)", [("a", 0.0)]),
        ("[a:1.3]", [("a:1.3", 1 / 1.1)]),
        ("(a:101)", [("a:101", 1.1)]),
        ("(a:-1)", [("a:-1", 1.1)]),
        (r"\\(b)", [("\\", 1.0), ("b", 1.1)]),
        ("a) (b)", [("a) ", 1.0), ("b", 1.1)]),
        ("(a [b)", [("a [b", 1.1)]),
    ):
        assert [
            (words, pytest.approx(weight)) for words, weight in markup.weighted_parts(text)
        ] == parts
    text = "a, (b, c:1.2), [d, (e, f)], (g, h"
    assert [part.strip() for part in markup.split_at_commas(text, whole_brackets=True)] == [
        "a", "(b, c:1.2)", "[d, (e, f)]", "(g", "h",
    ]  # fmt: skip
    assert markup.split_at_commas(text, whole_brackets=False) == text.split(",")


@given(marked)
def test_no_text_is_an_error(text: str) -> None:
    chosen = markup.with_choices_made(text, last)
    assert len(chosen) <= len(text)
    assert markup.with_choices_made(text, lambda count, place: 0) is not None
    parts = markup.weighted_parts(text)
    assert all(weight >= 0 for _, weight in parts)
    assert len(markup.words_of(parts)) <= len(text)
    assert ",".join(markup.split_at_commas(text, whole_brackets=True)) == text


@given(st.text(alphabet="ab ,|}:.12\u732b", max_size=40))
def test_words_without_marks_are_what_they_are(text: str) -> None:
    assert markup.with_choices_made(text, last) == text
    assert markup.words_of(markup.weighted_parts(text)) == text


@pytest.mark.parametrize("mark", ["{a|", "([", "(:1"])
def test_depth_does_not_matter(mark: str) -> None:
    text = mark * 3_000
    assert markup.with_choices_made(text, last) == text
    assert markup.words_of(markup.weighted_parts(text)) == text
    closed = "{" * 3_000 + "a|b" + "}" * 3_000
    assert markup.with_choices_made(closed, last) == "{" * 2_999 + "b" + "}" * 2_999
    assert markup.words_of(markup.weighted_parts("(" * 3_000 + "a" + ")" * 3_000)) == "a"
