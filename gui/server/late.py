"""An application that is built when it is first asked, because that takes seconds, and ended with the server."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from .guard import Application, GuardResponse, Message, Receive, Send, tell

_BROKEN = GuardResponse(
    status=500, sentence="This part of the server cannot be started; its log says why."
)


class Late:
    """Builds an application once somebody asks it; `live` runs beside the server from its start to its end."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._wanted, self._built = asyncio.Event(), asyncio.Event()
        self._application: Application | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._wanted.set()
        await self._built.wait()
        if self._application is None:
            await tell(send, _BROKEN)
        else:
            await self._application(scope, receive, send)

    async def live(self) -> None:
        """Build the application when it is wanted, and keep what it runs beside until this is cancelled.

        In one task, as what an application opens has to be closed in the task that opened it.
        """
        await self._wanted.wait()
        try:
            application = await asyncio.to_thread(self._build)
            async with application.router.lifespan_context(application):
                self._application = application
                self._built.set()
                await asyncio.Event().wait()
        except Exception:
            traceback.print_exc()
            raise
        finally:
            self._built.set()
