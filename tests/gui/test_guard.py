"""Which requests the server answers; the middleware is plain ASGI and needs no gradio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lora_trainer.gui.guard import LoopbackOnly, Message, Receive, Send, refusal

OWN = {"host": "127.0.0.1:7860"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7860", "localhost:1", "LOCALHOST", "[::1]:9"]
)
def test_this_machine_is_answered(host: str) -> None:
    assert refusal("GET", {"host": host}) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "evil@127.0.0.1.x", "[::1", "10.0.0.1"]
)
def test_other_names_are_refused(host: str) -> None:
    assert refusal("GET", {"host": host}) is not None


def test_a_request_without_host_is_refused() -> None:
    assert refusal("GET", {}) is not None


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:7861", "http://localhost:7860", ""]
)
def test_other_pages_change_nothing(origin: str) -> None:
    refused = refusal("POST", {**OWN, "origin": origin})
    assert refused is not None
    assert refused[0] == 403
    assert refusal("GET", {**OWN, "origin": origin}) is None


def test_the_own_page_may_post() -> None:
    assert refusal("POST", {**OWN, "origin": "http://127.0.0.1:7860"}) is None
    assert refusal("POST", OWN) is None


def through(scope: dict[str, Any]) -> tuple[list[Message], bool]:
    """Return what the middleware answered to a request, and whether it asked the app."""
    sent: list[Message] = []
    asked: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        asked.append(scope)

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(LoopbackOnly(app)(scope, receive, send))
    return sent, bool(asked)


def test_middleware_answers_for_the_app() -> None:
    scope = {"type": "http", "method": "GET", "headers": [(b"Host", b"evil.example")]}
    sent, asked = through(scope)
    assert not asked
    assert [message.get("status") for message in sent] == [400, None]
    own = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost")]}
    assert through(own) == ([], True)


def test_start_and_end_of_the_server_pass_and_websockets_do_not() -> None:
    assert through({"type": "lifespan"}) == ([], True)
    sent, asked = through({"type": "websocket", "headers": []})
    assert not asked
    assert sent[0]["type"] == "websocket.close"
