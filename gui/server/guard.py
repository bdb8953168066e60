"""Decides which requests reach the interface; what it lets through, comes from its own pages.

A page anywhere can make a browser send requests to 127.0.0.1: under a name of its own that resolves
there (DNS rebinding), as a form post, as an image. So each request has to name this server as its
host, may not come from another page, and carries the key of `access.py`, or its password where
others can reach the server. Input: ASGI requests. Output: those that pass, with headers that keep
the browser from asking any other host; a plain sentence for the others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = Mapping[str, str]

KNOCK_PATH = "/here"
BODY_MAX_BYTES = 16 * 2**20
# As uploads.py has it: `/upload/BATCH/NUMBER`.
_UPLOAD = re.compile(r"/upload/[^/]+/[^/]+")
# A folder of some hundred photographs is one upload.
UPLOAD_MAX_BYTES = 4 * 2**30
# What gradio_client uses of gradio's own routes. Among the others: fetching any address (proxy=), files
# (file=, upload), storing a session for whoever asks (deep_link), editing the program (vibe-edit).
_GRADIO_ROUTES = frozenset({*("cancel", "heartbeat", "info", "queue", "reset", "startup-events")})
_FROM_THIS_PAGE = frozenset({"same-origin", "none"})
# Scripts are files of ours; no other host is named anywhere.
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": CONTENT_POLICY.encode(),
}


@dataclass(frozen=True, kw_only=True)
class GuardResponse:
    """What the guard itself says to a request."""

    status: int
    sentence: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, as far as the decision needs it; header names are lower-case."""

    method: str
    path: str
    query: str
    headers: Headers
    client: str
    port: int

    @classmethod
    def of(cls, scope: Message) -> Asked:
        """Return the request of an ASGI scope."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            # A header sent twice must not be read once here and once differently behind.
            joint = "; " if name == "cookie" else ", "
            headers[name] = f"{headers[name]}{joint}{value}" if name in headers else value
        return cls(
            method=scope["method"],
            path=scope["path"],
            query=scope.get("query_string", b"").decode("latin-1"),
            headers=headers,
            client=(scope.get("client") or ("", 0))[0],
            port=(scope.get("server") or ("", 0))[1] or 0,
        )


class Access(Protocol):
    """Who may come in; see `access.py`."""

    @property
    def hosts(self) -> frozenset[str]:
        """The names under which a browser may ask for this server."""
        ...

    async def answer(self, asked: Asked) -> GuardResponse | None:
        """Return what to say to somebody who may not come in (yet), None for one who may."""
        ...


class Guard:
    """ASGI middleware around everything that is served."""

    def __init__(self, app: Application, *, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no page uses one, and any origin may open one
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = Asked.of(scope)
        said = (
            _knocked(asked, hosts=self.access.hosts)
            or refusal(asked, hosts=self.access.hosts)
            or await self.access.answer(asked)
            or _too_large(asked)
        )
        guarded = with_headers(send, _HEADERS)
        if said is not None:
            await tell(guarded, said)
            return
        body = LimitedBody(receive, guarded, limit_bytes=_limit_bytes(asked.path))
        await body.serve(self.app, scope)


def _knocked(asked: Asked, *, hosts: frozenset[str]) -> GuardResponse | None:
    """Return the answer to a page that asks under 127.0.0.1 whether a browser finds this host, see door.py."""
    if asked.path != KNOCK_PATH or hostname(asked.headers.get("host", "")) not in hosts:
        return None
    return GuardResponse(
        status=200, sentence="", headers={"cross-origin-resource-policy": "cross-origin"}
    )


def refusal(asked: Asked, *, hosts: frozenset[str]) -> GuardResponse | None:
    """Return the answer to a request that nobody may send, None for one that may pass.

    A request without Origin comes from a program or a plain navigation, which need the key as well.
    """
    host = asked.headers.get("host", "")
    if hostname(host) not in hosts:
        return GuardResponse(status=400, sentence="This server does not answer to that name.")
    if asked.headers.get("origin", f"//{host}").partition("//")[2] != host:
        return _OTHER_PAGE
    if _is_embedded_elsewhere(asked):
        return _OTHER_PAGE
    if _is_closed(asked.path):
        return GuardResponse(status=404, sentence="There is nothing at this address.")
    return None


def _too_large(asked: Asked) -> GuardResponse | None:
    declared = asked.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > _limit_bytes(asked.path):
        return _TOO_LARGE
    return None


_OTHER_PAGE = GuardResponse(status=403, sentence="This request comes from another page.")
_TOO_LARGE = GuardResponse(status=413, sentence="This is larger than the server takes.")


def hostname(host: str) -> str | None:
    """Return the name in a Host header, lower-case and without its port; None for no name."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_embedded_elsewhere(asked: Asked) -> bool:
    """Whether a browser says that another page asks; opening a link does not say so."""
    if asked.headers.get("sec-fetch-site", "none") in _FROM_THIS_PAGE:
        return False
    opened = asked.headers.get("sec-fetch-mode") == "navigate"
    return not (
        opened and asked.headers.get("sec-fetch-dest") == "document" and asked.method == "GET"
    )


def _is_closed(path: str) -> bool:
    first, _, rest = path.lstrip("/").partition("/")
    return first == "gradio_api" and rest.partition("/")[0] not in _GRADIO_ROUTES


def _limit_bytes(path: str) -> int:
    return UPLOAD_MAX_BYTES if _UPLOAD.fullmatch(path) else BODY_MAX_BYTES


class _BodyTooLarge(Exception):
    """Ends the request inside of the application."""


class LimitedBody:
    """Hands a request's body on until it is longer than allowed; then the answer is 413."""

    def __init__(self, receive: Receive, send: Send, *, limit_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left_bytes = limit_bytes
        self._answered = False

    async def serve(self, app: Application, scope: Message) -> None:
        """Let the application answer, or say that the body is too large."""
        with suppress(_BodyTooLarge):
            await app(scope, self._read, self._answer)
        if self._left_bytes < 0 and not self._answered:  # some layers turn the error into a 400
            await tell(self._send, _TOO_LARGE)

    async def _read(self) -> Message:
        message = await self._receive()
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise _BodyTooLarge
        return message

    async def _answer(self, message: Message) -> None:
        if self._left_bytes < 0 and not self._answered:
            return  # the application tells of an error of its own; the reason is ours
        self._answered = True
        await self._send(message)


def with_headers(send: Send, headers: Mapping[bytes, bytes]) -> Send:
    """Return a `send` that adds headers to the answer; one that is set stays."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            added = [(name, value) for name, value in headers.items() if name not in names]
            message = {**message, "headers": [*given, *added]}
        await send(message)

    return guarded


async def tell(send: Send, said: GuardResponse) -> None:
    """Send an answer of the guard's own; who may not come in keeps no connection open."""
    fields = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store"}
    if said.status >= 400 and said is not _TOO_LARGE:  # a browser hears that once it has sent all
        fields["connection"] = "close"
    headers = [
        (name.encode(), value.encode("latin-1"))
        for name, value in {**fields, **said.headers}.items()
    ]
    await send({"type": "http.response.start", "status": said.status, "headers": headers})
    await send({"type": "http.response.body", "body": said.sentence.encode()})
