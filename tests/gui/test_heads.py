"""Connections that send no whole request: each has some seconds, and a bound of them may wait at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("uvicorn", reason="uvicorn comes with gradio (extra `gui`)")

from lora_trainer.gui.server import heads, serve
from lora_trainer.gui.server.heads import BoundedHeads
from uvicorn import Config
from uvicorn.server import ServerState

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Transport(asyncio.Transport):
    """What the server writes to one browser, and whether it has hung up."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time goes on when a test says so."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def later(self, seconds: float) -> None:
        """Let time pass, and what waits for it happen."""
        self.now_s += seconds
        for _ in range(5):
            self.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def clock() -> Any:
    with contextlib.closing(Clock()) as loop:
        yield loop


@pytest.fixture
def connect(clock: Clock) -> Any:
    """Return a function that opens a connection to one server."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    config = Config(application, http=BoundedHeads, ws="none", lifespan="off", log_level="error")
    config.load()
    state = ServerState()

    def connect() -> tuple[BoundedHeads, Transport]:
        protocol, transport = BoundedHeads(config, state, {}, clock), Transport()
        protocol.connection_made(transport)
        return protocol, transport

    return connect


def test_a_head_that_does_not_end_is_given_up_however_slowly_it_comes(
    clock: Clock, connect: Any
) -> None:
    silent, slow, whole = connect(), connect(), connect()
    whole[0].data_received(ASKED)
    for number in range(12):
        slow[0].data_received(ASKED[number : number + 1])
        clock.later(heads.HEAD_WITHIN_S / 11)
    assert silent[1].closed and slow[1].closed
    assert b"200 OK" in whole[1].written
    again = connect()
    again[0].data_received(ASKED)
    clock.later(0)
    again[0].data_received(ASKED[:9])  # of the next one
    clock.later(heads.HEAD_WITHIN_S * 0.9)
    assert not again[1].closed
    clock.later(heads.HEAD_WITHIN_S * 0.2)
    assert again[1].closed
    assert not [c for c in again[0].connections if c.timer is not None]


def test_of_many_that_wait_the_oldest_goes_and_who_asks_is_answered(
    clock: Clock, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "OWING_MAX", 5)
    busy = connect()
    busy[0].data_received(ASKED)
    waiting = []
    for _ in range(8):
        clock.later(0.01)
        waiting.append(connect())
    assert [transport.closed for _, transport in waiting] == [True] * 3 + [False] * 5
    assert not busy[1].closed
    waiting[-1][0].data_received(ASKED)
    clock.later(0)
    assert b"200 OK" in waiting[-1][1].written


def test_the_server_that_is_started_gives_each_head_some_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Config] = []
    monkeypatch.setattr("uvicorn.Server", lambda config: made.append(config) or Mock())
    serve.run(Mock(), [])
    (config,) = made
    config.load()
    protocol = config.http_protocol_class(config, ServerState(), {}, clock)
    transport = Transport()
    protocol.connection_made(transport)
    protocol.data_received(ASKED[:9])
    clock.later(30)
    assert transport.closed
