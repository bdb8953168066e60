"""Caption text: encodings, cleaning, trigger, metadata.jsonl, sidecars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.dataset.caption_tables import read_table
from lora_trainer.dataset.captions import (
    Sidecars,
    clean,
    has_trigger,
    of_class,
    read_caption_file,
    with_trigger,
)

# Named rather than all of Unicode, whose tables take hypothesis seconds to build.
letters = st.text(
    alphabet="abz ,.*()[]%\n\t\u00a0\u00e9e\u0301\u2028\u202e\u732b\U0001f600", max_size=60
)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xfe\xff" + "a \u732b".encode("utf-16-be"), "a \u732b"),
        (b"line one,\n\n  line\ttwo ", "line one, line two"),
        (b"\xff\xfe", ""),
    ],
)
def test_well_formed_captions_are_read_without_complaint(data: bytes, text: str) -> None:
    found = read_caption_file("a.txt", data)
    assert (found.text, found.problems) == (text, ())


@pytest.mark.parametrize(
    ("data", "text", "named"),
    [
        (b"it\x92s a cat", "it\u2019s a cat", "byte 2 (0x92) is not UTF-8; read as Windows-1252"),
        (b"a\x81b", "a\ufffdb", "byte 1 (0x81) is not UTF-8"),
        (b"\xff\xfea\x00b", "a\ufffd", "byte 4 (0x62) is not UTF-16-LE"),
        (b"ca\x00t", "cat", "byte 2 is NUL; 1 such characters left out"),
        (b"\xef\xbb\xbf\xc3\xa9\x00", "\u00e9", "byte 5 is NUL"),
        (b"x" * ((16 << 20) + 1), "", "is 16,777,217 bytes long, too long for a caption"),
    ],
)
def test_odd_bytes_are_named_and_survived(data: bytes, text: str, named: str) -> None:
    found = read_caption_file("a.txt", data)
    (problem,) = found.problems
    assert (found.text, named in problem) == (text, True)


@given(letters, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_what_was_written_is_read(text: str, encoding: str) -> None:
    wanted = clean(text)
    found = read_caption_file("a.txt", wanted.encode(encoding))
    assert (found.text, found.problems) == (wanted, ())


@pytest.mark.parametrize(
    ("caption", "trigger", "wanted"),
    [
        ("a cat", "zibbo", "zibbo, a cat"),
        ("", "zibbo", "zibbo"),
        ("Zibbo, a cat", "zibbo", "Zibbo, a cat"),
        ("a zibbo!", "zibbo", "a zibbo!"),
        ("prezibbo", "zibbo", "zibbo, prezibbo"),
        ("[trigger] in a tree, [trigger]", "zibbo", "zibbo in a tree, zibbo"),
        ("[trigger] here", None, "[trigger] here"),
        ("a cat", "c.t", "c.t, a cat"),
        ("a cat", " ", "a cat"),
    ],
)
def test_trigger(caption: str, trigger: str | None, wanted: str) -> None:
    assert with_trigger(caption, trigger) == wanted


@given(letters, st.text(alphabet="abz .*(", min_size=1, max_size=8))
def test_the_trigger_is_put_in_once(caption: str, trigger: str) -> None:
    once = with_trigger(caption, trigger)
    assert not trigger.strip() or has_trigger(once, trigger)
    assert with_trigger(once, trigger) == once


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a photo of ZWX, smiling", "a photo of woman, smiling"),
        ("zwxy is another word", None),
    ],
)
def test_the_class_takes_the_place_of_the_trigger(caption: str, expected: str | None) -> None:
    assert of_class(caption, trigger="zwx", class_word="woman") == expected
    assert of_class(caption, trigger=None, class_word="woman") is None


def test_lines_of_metadata_are_read_and_bad_ones_named() -> None:
    lines = [
        '\ufeff{"file_name": "a.png", "text": "a"}',
        '{"file_name": "a.png", "text": ["one", " two ", ""]}',
        "{nonsense",
        '["a.png"]',
        '{"file_name": 3, "text": "x"}',
        '{"file_name": "b.png", "text": ["one", 2]}',
        "[" * 100_000,
        '{"file_name": "s.png", "text": "\\ud800"}',
        '{"file_name": "sub\\\\b.png", "prompt": "no", "text": "first\\nkey wins"}',
        '{"file_name": "./c.png", "prompt": "four\u2028five"}',
    ]
    found, problems = read_table("metadata.jsonl", "\n".join(lines).encode())
    assert {name: (caption.text, caption.lines) for name, caption in found.items()} == {
        "a.png": ("one two", ("one", "two")),
        "s.png": ("?", ()),
        "sub/b.png": ("first key wins", ()),
        "c.png": ("four five", ()),
    }
    assert [problem.split(":")[0] for problem in problems] == [
        "a.png occurs again; the last row counts",
        *(f"line {number}" for number in (3, 4, 5, 6)),
        "1 more lines like these",
    ]
    file = read_caption_file("a.txt", b"one\r\n\n  two  2\nthree")
    assert (file.text, file.lines) == ("one two 2 three", ("one", "two 2", "three"))
    assert read_caption_file("a.txt", b"only one\n\n").lines == ()


def test_sidecars_prefer_the_exact_name_and_the_first_extension() -> None:
    names = ["a.caption", "a.txt", "A.TXT", "b.caption", "caf\u00e9.txt"]
    found = Sidecars(names, extensions=("txt", ".caption"))
    assert [found.find(f"{stem}.png")[:1] for stem in ("a", "A", "b", "B", "none")] == [
        ["a.txt"],
        ["A.TXT"],
        ["b.caption"],
        ["b.caption"],
        [],
    ]
    assert found.find("cafe\u0301.png") == ["caf\u00e9.txt"]
