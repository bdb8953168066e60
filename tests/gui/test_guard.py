"""Which requests the server answers; the middleware is plain ASGI and needs no gradio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from lora_trainer.gui import guard
from lora_trainer.gui.guard import Asked, Guard, GuardResponse, Message, Receive, Send, refusal

OWN = {"host": "127.0.0.1:7860"}
HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Everybody:
    """Lets everybody in."""

    hosts: frozenset[str] = HOSTS

    async def answer(self, asked: Asked) -> GuardResponse | None:
        return None


def asked(headers: Mapping[str, str], *, method: str = "GET", path: str = "/") -> Asked:
    return Asked(method=method, path=path, query="", headers=headers, client="127.0.0.1", port=7860)


def refused(headers: Mapping[str, str], *, method: str = "GET", path: str = "/") -> int | None:
    """Return the status of the refusal, None for a request that passes."""
    answer = refusal(asked(headers, method=method, path=path), hosts=HOSTS)
    return answer.status if answer else None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7860", "localhost:1", "LOCALHOST", "[::1]:9"]
)
def test_this_machine_is_answered(host: str) -> None:
    assert refused({"host": host}) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "evil@127.0.0.1.x", "[::1", "10.0.0.1"]
    + ["127.0.0.1, evil.example", "localhost.evil.example:7860", "0.0.0.0:7860", "2130706433"],
)
def test_other_names_are_refused(host: str) -> None:
    assert refused({"host": host}) == 400
    assert refused({}) == 400


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:7861",
        "http://localhost:7860",
        "",
        "http://[",
    ]
    + [
        "http://127.0.0.1:7860.evil.example",
        "http://evil.example//127.0.0.1:7860",
        "http://127.0.0.1",
    ],
)
def test_other_pages_get_and_change_nothing(origin: str, method: str) -> None:
    assert refused({**OWN, "origin": origin}, method=method) == 403


def test_the_own_page_may_post() -> None:
    assert refused({**OWN, "origin": "http://127.0.0.1:7860"}, method="POST") is None
    assert refused(OWN, method="POST") is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_elsewhere_may_link_here_and_embed_nothing(site: str) -> None:
    fetched = {**OWN, "sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    assert refused({**fetched, "sec-fetch-dest": "image"}, path="/media/thumb") == 403
    opened = {**OWN, "sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    assert refused({**opened, "sec-fetch-dest": "iframe"}) == 403
    assert refused({**opened, "sec-fetch-dest": "document"}) is None
    assert refused({**opened, "sec-fetch-dest": "document"}, method="POST") == 403
    assert refused({**OWN, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}) is None


@pytest.mark.parametrize(
    "path",
    ["/gradio_api/proxy=http://evil.example/", "/gradio_api/deep_link", "/gradio_api/vibe-edit"]
    + ["/gradio_api/file=http://169.254.169.254/x", "/gradio_api/file=HTTPS://x/", "/monitoring"]
    + ["/gradio_api/file=//host/share", "/gradio_api/file=\\\\host\\share", "//gradio_api/runs"]
    + ["/gradio_api/process_recording", "/gradio_api/call/x", "/gradio_api/run/x", "/openapi.json"]
    + ["/login", "/logout", "/gradio_api/openapi.json", "/gradio_api/token", "/gradio_api/"],
)
def test_routes_that_no_page_uses_are_closed(path: str) -> None:
    assert refused(OWN, path=path) == 404


@pytest.mark.parametrize(
    "path", ["/", "/train", "/config", "/assets/x.js", "/gradio_api/queue/join", "/theme.css"]
)
def test_routes_of_the_pages_are_open(path: str) -> None:
    assert refused(OWN, path=path) is None


def through(
    scope: dict[str, Any], *, body: tuple[bytes, ...] = (), answering: int = 200
) -> tuple[list[Message], list[bytes]]:
    """Return what was answered to a request, and the body that the application has read.

    The application turns an error while it reads into a 400, as web frameworks do.
    """
    sent: list[Message] = []
    read: list[bytes] = []
    parts = list(body)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        status = answering
        try:
            while parts:
                read.append((await receive())["body"])
        except Exception:  # noqa: BLE001 - the frameworks' own behaviour
            status = 400
        if scope["type"] == "http":
            headers = [(b"content-type", b"text/html"), (b"X-Frame-Options", b"SAMEORIGIN")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"page"})
        else:
            await send({"type": "passed"})

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Guard(app, access=Everybody())(scope, receive, send))
    return sent, read


def http(path: str = "/", **headers: str) -> dict[str, Any]:
    fields = {"host": "localhost", **headers}
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()
        ],
    }


def test_middleware_answers_for_the_app() -> None:
    sent, _ = through(http(host="evil.example"))
    assert [message.get("status") for message in sent] == [400, None]


def test_a_header_that_comes_twice_is_refused() -> None:
    scope = http()
    scope["headers"].append((b"host", b"evil.example"))
    assert through(scope)[0][0]["status"] == 400


def test_every_answer_keeps_the_browser_to_this_server() -> None:
    for scope in (http(), http(host="evil.example")):
        headers = dict(through(scope)[0][0]["headers"])
        policy = headers[b"content-security-policy"].decode()
        assert "default-src 'self'" in policy
        assert "http:" not in policy
        assert "https:" not in policy
        assert "*" not in policy
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert headers[b"referrer-policy"] == b"no-referrer"


def test_a_header_that_the_application_sets_stays() -> None:
    names = [name.lower() for name, _ in through(http())[0][0]["headers"]]
    assert names.count(b"x-frame-options") == 1
    refused_headers = dict(through(http(host="x"))[0][0]["headers"])
    assert refused_headers[b"x-frame-options"] == b"DENY"


@pytest.mark.parametrize("declared", ["11", "999999999999", "-1", "x"])
def test_a_body_that_says_it_is_too_large_is_not_read(
    declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_MAX_BYTES", 10)
    sent, read = through(http(content_length=declared), body=(b"x",))
    assert (sent[0]["status"], read) == (413, [])


def test_a_body_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_MAX_BYTES", 10)
    monkeypatch.setattr(guard, "UPLOAD_MAX_BYTES", 12)
    sent, read = through(http(), body=(b"12345", b"67890", b"1", b"2"))
    assert [message.get("status") for message in sent] == [413, None]
    assert read == [b"12345", b"67890"]
    assert through(http(), body=(b"12345", b"67890"))[0][0]["status"] == 200
    upload = through(http(guard.UPLOAD_PATH), body=(b"12345", b"67890", b"1"))
    assert upload[0][0]["status"] == 200


def test_start_and_end_of_the_server_pass_and_websockets_do_not() -> None:
    assert through({"type": "lifespan"})[0] == [{"type": "passed"}]
    sent, _ = through({"type": "websocket", "headers": []})
    assert sent[0]["type"] == "websocket.close"
