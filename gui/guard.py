"""Keeps web pages of others out of a server that runs on this machine only.

A page anywhere can make the browser send requests to 127.0.0.1: under a name of its own that
resolves there (DNS rebinding), or as a form post. Input: the ASGI requests of the server. Output:
status 400 for a host that is not this machine, 403 for a change that another origin asks for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD"})


class LoopbackOnly:
    """ASGI middleware that answers for itself where `refusal` finds something."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        found = refusal(scope["method"], _headers(scope)) if scope["type"] == "http" else None
        if found is None and scope["type"] != "websocket":
            await self.app(scope, receive, send)
        elif found is not None:
            await _answer(send, *found)
        else:  # the page uses none, and a browser lets every origin open one
            await send({"type": "websocket.close", "code": 1008})


def refusal(method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and sentence with which a request is refused, None for one that may pass.

    `headers` are by lower-case name. A request without Origin comes from a program or a plain
    navigation, which can read what any program of this user can.
    """
    host = headers.get("host", "")
    if _hostname(host) not in LOOPBACK:
        return 400, "This server answers to 127.0.0.1 and localhost only."
    if method not in _READING and "origin" in headers:
        origin = urlsplit(headers["origin"]).netloc
        if origin != host:
            return 403, "This request comes from another page."
    return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _headers(scope: Message) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


async def _answer(send: Send, status: int, sentence: str) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind]})
    await send({"type": "http.response.body", "body": sentence.encode()})
