"""The language of the pages: which one a request gets, what its file may say, what a page carries."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from scripts import gui_texts

pytest.importorskip("starlette", reason="gradio is not installed (extra `gui`)")

from lora_trainer.gui import language
from starlette.datastructures import Headers

PLACEHOLDER = gui_texts.PLACEHOLDER
CODES = [code for code in language.languages() if code != language.ENGLISH]


@pytest.mark.parametrize(
    ("accepted", "cookie", "code"),
    [
        ("de-DE,de;q=0.9,en;q=0.8", "", "de"),
        ("en-GB,en;q=0.9,de;q=0.5", "", "en"),
        ("fr,de;q=0.3,en;q=0.2", "", "de"),
        ("de;q=0,fr", "", "en"),
        ("de;q=much,*", "", "en"),
        ("", "", "en"),
        ("de", f"{language.COOKIE}=en", "en"),
        ("en", f"other=1; {language.COOKIE}=de", "de"),
        ("de", f"{language.COOKIE}=../../etc", "de"),
    ],
)
def test_the_choice_counts_before_what_the_browser_asks_for(
    accepted: str, cookie: str, code: str
) -> None:
    assert language.wanted(Headers({"accept-language": accepted, "cookie": cookie})) == code


@pytest.mark.parametrize("code", CODES)
def test_each_entry_is_a_text_of_the_sources_with_the_same_placeholders(code: str) -> None:
    assert gui_texts.dead(code) == []
    for english, other in language.words(code).items():
        placed, in_other = (Counter(PLACEHOLDER.findall(text)) for text in (english, other))
        assert placed == in_other, english
        assert other and other.rstrip() == other, english
        if PLACEHOLDER.search(english):
            letters = re.sub(r"[^A-Za-z]", "", PLACEHOLDER.sub("", english))
            assert len(letters) >= 2, f"{english}: only placeholders"
