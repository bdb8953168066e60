"""The language of the pages: which one a request gets, what its file may say, what a page carries."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest

from scripts import gui_texts

pytest.importorskip("starlette", reason="gradio is not installed (extra `gui`)")

from lora_trainer.gui import language
from starlette.datastructures import Headers

PLACEHOLDER = gui_texts.PLACEHOLDER
CODES = [code for code in language.languages() if code != language.ENGLISH]
PAGE = (
    b'<!doctype html><html lang="en"><head><title>Home</title></head><body>\xc3\xa4</body></html>'
)


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


def served(path_accepts: str, language_accepted: str, *, kind: bytes = b"text/html") -> bytes:
    """Return the body that `language.serve` makes of PAGE, and check its length."""
    sent: list[Any] = []

    async def pages(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(PAGE)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PAGE[:60], "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[60:]})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    asked = {"accept": path_accepts, "accept-language": language_accepted}
    raw = [(name.encode(), value.encode()) for name, value in asked.items()]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": raw}
    asyncio.run(language.serve(pages, scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    assert Headers(raw=sent[0]["headers"])["content-length"] == str(len(body))
    return body


def test_a_page_names_its_language_and_an_english_one_stays_as_it_is() -> None:
    german = served("text/html", "de").decode()
    assert '<html lang="de"><head><script src="/ui/language/de.js"></script>' in german
    assert served("text/html", "en") == PAGE
    assert served("application/json", "de") == PAGE
    assert served("text/html", "de", kind=b"application/json") == PAGE


@pytest.mark.parametrize("code", CODES)
def test_each_entry_is_a_text_of_the_sources(code: str) -> None:
    assert gui_texts.dead(code) == []


@pytest.mark.parametrize("code", CODES)
def test_both_sides_have_the_same_placeholders(code: str) -> None:
    for english, other in language.words(code).items():
        placed, in_other = (Counter(PLACEHOLDER.findall(text)) for text in (english, other))
        assert placed == in_other, english
        assert other and other.rstrip() == other, english


@pytest.mark.parametrize("code", CODES)
def test_no_entry_takes_texts_that_it_does_not_mean(code: str) -> None:
    for english in language.words(code):
        if PLACEHOLDER.search(english):
            letters = re.sub(r"[^A-Za-z]", "", PLACEHOLDER.sub("", english))
            assert len(letters) >= 2, f"{english}: only placeholders"
