"""HTTP connections that have to say what they want: a time limit for the head of a request, and a bound.

uvicorn waits for ever for the rest of a request's head, so that some hundred half-sent requests close a server
to everybody, before any key or password is asked for. Here a connection has some seconds for each head, and
when more than a bound of them owe one, the one that waits longest is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WITHIN_S = 10.0
OWING_MAX = 200


class BoundedHeads(H11Protocol):
    """One connection; it owes a head while `timer` runs."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head, in place of whoever waits longest where many do."""
        super().connection_made(transport)
        self._owe_head()
        others = [other for other in self.connections if isinstance(other, BoundedHeads)]
        owing = [(other.timer.when(), other) for other in others if other.timer is not None]
        if len(owing) > OWING_MAX:
            min(owing, key=lambda pair: pair[0])[1].give_up()

    def data_received(self, data: bytes) -> None:
        """Take what came; while a connection says nothing at all, uvicorn's limit for idle ones counts."""
        before: object = self.cycle
        if before and self.cycle.response_complete and self.timer is None:
            self._owe_head()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Owe nothing any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close a connection that has sent no whole head."""
        self._stop_timer()
        self.transport.close()

    def _owe_head(self) -> None:
        self.timer = self.loop.call_later(HEAD_WITHIN_S, self.give_up)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
