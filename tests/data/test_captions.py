"""Caption text: encodings, cleaning, trigger, metadata.jsonl, sidecars, variants and draws."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.dataset.caption_tables import read_table
from lora_trainer.dataset.captions import (
    MAX_CAPTION_BYTES,
    Sidecars,
    clean,
    has_trigger,
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
        (b"a cat\r\n", "a cat"),
        (b"\xef\xbb\xbfa cat", "a cat"),
        ("ein K\u00e4tzchen".encode(), "ein K\u00e4tzchen"),
        ("a \u732b".encode("utf-16"), "a \u732b"),
        (b"\xfe\xff" + "a \u732b".encode("utf-16-be"), "a \u732b"),
        ("a \u732b".encode("utf-32"), "a \u732b"),
        (b"line one,\n\n  line\ttwo ", "line one, line two"),
        (b"", ""),
        (b" \r\n\t ", ""),
        (b"\xef\xbb\xbf", ""),
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
        ("\u4e2d\u56fd cat".encode("gbk"), None, "byte 0 (0xd6) is not UTF-8"),
        ("\u732b cat".encode("shift-jis"), None, "byte 0 (0x94) is not UTF-8"),
        (b"a\x81b", "a\ufffdb", "byte 1 (0x81) is not UTF-8"),
        (b"\xff\xfea\x00b", "a\ufffd", "byte 4 (0x62) is not UTF-16-LE"),
        (b"ca\x00t", "cat", "byte 2 is NUL; 1 such characters left out"),
        ("cat".encode("utf-16-le"), "cat", "byte 1 is NUL; 3 such characters left out"),
        (b"\xef\xbb\xbf\xc3\xa9\x00", "\u00e9", "byte 5 is NUL"),
    ],
)
def test_odd_bytes_are_named_and_survived(data: bytes, text: str | None, named: str) -> None:
    found = read_caption_file("a.txt", data)
    assert len(found.problems) == 1
    assert named in found.problems[0]
    assert text is None or found.text == text
    assert found.text.endswith("cat") or text is not None


def test_a_huge_file_is_no_caption() -> None:
    found = read_caption_file("a.txt", b"x" * (MAX_CAPTION_BYTES + 1))
    assert found.text == ""
    assert "too long for a caption" in found.problems[0]


@given(letters, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_what_was_written_is_read(text: str, encoding: str) -> None:
    wanted = clean(text)
    found = read_caption_file("a.txt", wanted.encode(encoding))
    assert (found.text, found.problems) == (wanted, ())


@pytest.mark.parametrize(
    ("caption", "trigger", "wanted"),
    [
        ("a cat", None, "a cat"),
        ("a cat", "zibbo", "zibbo, a cat"),
        ("", "zibbo", "zibbo"),
        ("Zibbo, a cat", "zibbo", "Zibbo, a cat"),
        ("a zibbo!", "zibbo", "a zibbo!"),
        ("zibbos in a row", "zibbo", "zibbo, zibbos in a row"),
        ("prezibbo", "zibbo", "zibbo, prezibbo"),
        ("[trigger] in a tree, [trigger]", "zibbo", "zibbo in a tree, zibbo"),
        ("[trigger] here", None, "[trigger] here"),
        ("a cat", "c.t", "c.t, a cat"),
        ("a cat", " ", "a cat"),
        ("a cat by ohwx man", "ohwx man", "a cat by ohwx man"),
    ],
)
def test_trigger(caption: str, trigger: str | None, wanted: str) -> None:
    assert with_trigger(caption, trigger) == wanted


@given(letters, st.text(alphabet="abz .*(", min_size=1, max_size=8))
def test_the_trigger_is_put_in_once(caption: str, trigger: str) -> None:
    once = with_trigger(caption, trigger)
    assert not trigger.strip() or has_trigger(once, trigger)
    assert with_trigger(once, trigger) == once


def test_metadata_lines() -> None:
    rows = [
        {"file_name": "a.png", "text": "one\ntwo"},
        {"file_name": "sub\\b.png", "caption": "three"},
        {"file_name": "./c.png", "prompt": "four\u2028five"},
        {"file_name": "d.png", "prompt": "no", "caption": "no", "text": "first key wins"},
    ]
    data = "\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    found = read_table("metadata.jsonl", data.encode())
    assert found[1] == []
    assert {name: caption.text for name, caption in found[0].items()} == {
        "a.png": "one two",
        "sub/b.png": "three",
        "c.png": "four five",
        "d.png": "first key wins",
    }
    assert not any(caption.lines for caption in found[0].values()), "each is one caption"


def test_several_captions_of_a_picture_are_kept_apart_and_joined() -> None:
    found = read_caption_file("a.txt", b"one\r\n\n  two  2\nthree\x00")
    assert (found.text, found.lines) == ("one two 2 three", ("one", "two 2", "three"))
    assert read_caption_file("a.txt", b"only one\n\n").lines == ()
    row = json.dumps({"file_name": "a.png", "text": ["one", " two ", ""]})
    listed = read_table("metadata.jsonl", row.encode())[0]["a.png"]
    assert (listed.text, listed.lines) == ("one two", ("one", "two"))
    _, (problem,) = read_table("metadata.jsonl", b'{"file_name": "a.png", "text": ["one", 2]}')
    assert "no text under" in problem


def test_bad_metadata_lines_are_named_and_the_others_used() -> None:
    lines = [
        '{"file_name": "a.png", "text": "a"}',
        '{"file_name": "a.png", "text": "b"}',
        "{nonsense",
        '["a.png"]',
        '{"file_name": 3, "text": "x"}',
        '{"file_name": "b.png", "text": 3}',
        "[" * 100_000,
        '{"file_name": "s.png", "text": "\\ud800"}',
    ]
    found = read_table("metadata.jsonl", "\n".join(lines).encode())
    texts = {name: caption.text for name, caption in found[0].items()}
    assert texts == {"a.png": "b", "s.png": "?"}
    assert [problem.split(":")[0] for problem in found[1]] == [
        "a.png occurs again; the last row counts",
        *(f"line {number}" for number in (3, 4, 5, 6)),
        "1 more lines like these",
    ]


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
