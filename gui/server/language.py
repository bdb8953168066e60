"""The language of the pages: written in English, said in another one by a script of the browser.

Inputs: a request's cookie and Accept-Language; languages/CODE.json with the words of each language. Outputs:
which language a page is shown in, its script, and pages that name both. English pages have no such script.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders

from .cookies import cookies
from .guard import Application, Message, Receive, Send

ENGLISH = "en"
COOKIE = "lora_train_language"
_FOLDER = Path(__file__).parents[1] / "languages"
_SCRIPT = Path(__file__).parents[1] / "assets" / "language.js"
# The colours of assets/site.css, before it comes: else each page begins with a white flash in a dark scheme.
FIRST_FRAME = (
    '<meta name="color-scheme" content="light dark"><style>html { background: #fbf9f6; } '
    "@media (prefers-color-scheme: dark) { html { background: #161514; } }</style>"
)
# The text whose translation is the name of the language itself: `Deutsch`.
_OWN_NAME = "English"


@cache
def languages() -> dict[str, str]:
    """Return the languages by code, each by its own name, English first."""
    others = {path.stem: words(path.stem)[_OWN_NAME] for path in sorted(_FOLDER.glob("*.json"))}
    return {ENGLISH: _OWN_NAME, **others}


def words(code: str) -> dict[str, str]:
    """Return the texts of a language by their English texts."""
    texts: dict[str, str] = json.loads((_FOLDER / f"{code}.json").read_text(encoding="utf-8"))
    return texts


def script(code: str) -> str:
    """Return the script that puts the texts of a language in place of the English ones."""
    texts = json.dumps(words(code), ensure_ascii=False)
    return f"{_SCRIPT.read_text(encoding='utf-8')}\ntranslatePage({texts});\n"


def wanted(headers: Headers) -> str:
    """Return the language of a request: the chosen one, else the first that the browser asks for."""
    chosen = next(cookies(headers.get("cookie", ""), COOKIE), "")
    if chosen in languages():
        return chosen
    return next((code for code in _accepted(headers) if code in languages()), ENGLISH)


def _accepted(headers: Headers) -> list[str]:
    """Return the codes of Accept-Language, the most wished first, without their countries."""
    ranked: list[tuple[float, str]] = []
    for part in headers.get("accept-language", "").split(","):
        tag, _, weight = part.strip().partition(";q=")
        try:
            ranked.append((float(weight or 1), tag.partition("-")[0].lower()))
        except ValueError:
            continue
    return [code for weight, code in sorted(ranked, key=lambda pair: -pair[0]) if weight > 0]


async def serve(pages: Application, scope: Message, receive: Receive, send: Send) -> None:
    """Let `pages` answer; a page gets its language, its script, and its scheme before any style sheet comes."""
    headers = Headers(scope=scope)
    asks_for_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
    code = wanted(headers) if asks_for_page else ENGLISH
    if not asks_for_page:
        await pages(scope, receive, send)
        return
    # The page is changed on its way, so it must come as text.
    plain = [pair for pair in scope["headers"] if pair[0].lower() != b"accept-encoding"]
    await pages({**scope, "headers": plain}, receive, _Translating(send, code))


class _Translating:
    """A `send` that puts the language into the answer where that is a page."""

    def __init__(self, send: Send, code: str) -> None:
        self._send, self._code = send, code
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if Headers(raw=message["headers"]).get("content-type", "").startswith("text/html"):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._page(self._start)
            return
        await self._send(message)

    async def _page(self, start: Message) -> None:
        script = f'<script src="/ui/language/{self._code}.js"></script>'
        loaded = f"<head>{FIRST_FRAME}{script if self._code != ENGLISH else ''}"
        named = f'lang="{self._code}" data-language="{self._code}"'
        page = self._body.replace(b'lang="en"', named.encode(), 1)
        page = page.replace(b"<head>", loaded.encode(), 1)
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-length"] = str(len(page))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": page})
