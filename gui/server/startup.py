"""What is served without Gradio: the pages that have moved, and what pages ask.

    /live          the trainings that run
    /ready         whether Gradio's pages are there
    /ui, /media, /upload   assets, pictures, uploads

Importing Gradio and laying its pages out takes some seconds; a browser that comes before for one of them sees
that it is being opened, at once. Inputs: ASGI requests. Output: answers of our own, Gradio's for
everything else once it is there.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from lora_trainer.hardware.machine import detect

from .. import media, uploads
from ..compare import routes as compare
from ..datasets import routes as datasets
from ..home import routes as home
from ..launch import warm_up
from ..library import routes as library
from ..live import live
from ..machine import routes as machine
from ..markup import PLACES, bar, document, tag
from ..queue import routes as queue
from ..run import routes as run
from ..settings import routes as settings
from ..share import routes as share
from ..shared import browse
from ..state import Followed
from ..train import routes as train
from ..trash import routes as trash
from ..workplace import Workplace
from . import asset_files, language
from .guard import BLOCKS_POLICY, Application, Message, Receive, Send, with_headers

_SCRIPT = """
import { start } from "/ui/shared/live.js";
start(document.querySelector(".bar"));
for (;;) {
  const answer = await fetch("/ready").catch(() => null);
  if (answer?.status === 200) break;
  await new Promise((resolve) => setTimeout(resolve, 250));
}
location.reload();
"""


class Front:
    """Answers what needs no Gradio, and hands on to `build()` what does, once that has returned."""

    def __init__(self, work: Workplace, build: Callable[[], Any]) -> None:
        self._work, self._build = work, build
        self._pages: Application | None = None
        self._followed = Followed()
        self.own = Router(
            routes=[
                Route("/live", self._live),
                Route("/ready", self._ready),
                *asset_files.routes(),
                *home.routes(work),
                *run.routes(work),
                *queue.routes(work),
                *compare.routes(work),
                *share.routes(work),
                *train.routes(work),
                *trash.routes(work),
                *machine.routes(work),
                *settings.routes(work),
                *datasets.routes(work),
                *browse.routes(work),
                *library.routes(work),
                *uploads.routes(work),
                *media.routes(work),
            ],
            default=self._other,
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self.own(scope, receive, send)

    async def _other(self, scope: Message, receive: Receive, send: Send) -> None:
        own = with_headers(send, {b"content-security-policy": BLOCKS_POLICY.encode()})
        await language.serve(self._pages or self._opening, scope, receive, own)

    async def _opening(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = await asyncio.to_thread(self._first, Request(scope))
        await answer(scope, receive, send)

    def _first(self, request: Request) -> Response:
        """Return what a page shows before Gradio is there; a program is asked to come again."""
        if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
            later = {"retry-after": "2"}
            return PlainTextResponse("The pages are being opened.", status_code=503, headers=later)
        title = next((p.name for p in PLACES if p.path == request.url.path), "Opening")
        shown = tag("p", "Opening\u2026", class_="empty quiet", role="status")
        page = document(title, tag("div", bar(title), shown), script=_SCRIPT)
        return HTMLResponse(page, headers={"cache-control": "no-store"})

    async def _ready(self, request: Request) -> Response:
        return PlainTextResponse("", status_code=200 if self._pages is not None else 202)

    async def _live(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(live, self._work, self._followed))

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        """Open the pages beside, and close them with the server."""
        await receive()
        # Before Gradio is imported, not while: CPython 3.11 cannot parse (ast.parse) in two threads at
        # once, and both do (SystemError: AST constructor recursion depth mismatch).
        await anyio.to_thread.run_sync(detect)
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(self._open(stack))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self, stack: AsyncExitStack) -> None:
        try:
            pages = await asyncio.to_thread(self._build)
        except Exception:
            traceback.print_exc()
            signal.raise_signal(signal.SIGINT)  # no page will ever come
            raise
        # Gradio's server begins its queue where it is started, which mounting it leaves to us.
        await stack.enter_async_context(pages.router.lifespan_context(pages))
        self._pages = pages
        await asyncio.to_thread(warm_up)
