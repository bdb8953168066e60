"""All that is served: the pages, what their scripts ask, and what programs ask.

    /live          the trainings that run
    /ui, /media, /upload   assets, pictures, uploads
    /config, /gradio_api   the operations, for gradio_client
    /mcp           the operations, for assistants, where the server was started with --mcp

Inputs: ASGI requests. Outputs: their answers. The processes that plan and check are started beside, so that the first
plan does not wait for their imports.
"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import suppress
from pathlib import Path

import anyio
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route, Router

from lora_trainer.hardware.machine import detect

from .. import media, uploads
from ..command_lines import start_plan_processes
from ..live import live
from ..markup import place_named
from ..programs import Tools
from ..programs.operations import Operations
from ..programs.served import (
    GRADIO_PATHS,
    MCP_PATH,
    gradio_application,
    mcp_application,
)
from ..runs import Followed
from ..shared import browse
from ..uploads import INCOMING, forget_old
from ..workplace import Workplace
from . import asset_files
from .faults import Faults
from .guard import Message, Receive, Send
from .late import Late
from .pages import draw, words_of

_KEPT_S = 24 * 3600
_GUI = Path(__file__).parents[1]
# Each folder of a page, and that of the dialogs which share a LoRA, lists its own routes.
PAGES = tuple(sorted(file.parent.name for file in _GUI.glob("*/routes.py")))


class AllRoutes:
    """Every route of the server. Gradio and the tools for assistants are built when they are first asked."""

    def __init__(self, work: Workplace, *, tools: Tools = "off") -> None:
        self._work = work
        self._followed = Followed()
        operations = Operations(work=work)
        gradio = Late(lambda: gradio_application(operations))
        mcp = Late(lambda: mcp_application(operations, may_write=tools == "write"))
        self._late = (gradio, mcp)
        self.own = Router(
            routes=[
                Route("/live", self._live),
                *asset_files.routes(),
                *_page_routes(work),
                *browse.routes(work),
                *uploads.routes(work),
                *media.routes(work),
                *(Route(path, gradio) for path in GRADIO_PATHS),
                *([Route(MCP_PATH, mcp)] if tools != "off" else []),
            ],
            default=self._nothing,
        )
        self._answered = Faults(self.own)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._answered(scope, receive, send)

    async def _nothing(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = await asyncio.to_thread(_no_page, Request(scope))
        await answer(scope, receive, send)

    async def _live(self, request: Request) -> Response:
        return JSONResponse(
            await asyncio.to_thread(live, self._work, self._followed, words_of(request))
        )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Serve until the end of the server, and end what was built beside."""
        await receive()
        await anyio.to_thread.run_sync(detect)
        forget_old(self._work.own / INCOMING, kept_s=_KEPT_S)
        beside = [asyncio.create_task(late.live()) for late in self._late]
        beside.append(asyncio.create_task(asyncio.to_thread(start_plan_processes)))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError, Exception):  # what it printed says why
                await task
        await send({"type": "lifespan.shutdown.complete"})


def _page_routes(work: Workplace) -> list[Route]:
    """Return what the routes.py of each folder of PAGES lists."""
    package = __name__.removesuffix(".server.startup")
    found = [importlib.import_module(f"{package}.{page}.routes") for page in PAGES]
    return [route for module in found for route in module.routes(work)]


def _no_page(request: Request) -> Response:
    """Return the answer at an address where there is nothing."""
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("There is nothing at this address.", status_code=404)
    if (path := place_named(request.url.path)) is not None and path != request.url.path:
        return RedirectResponse(path, status_code=307)
    markup = draw(
        request,
        "shared/fault.html",
        title="No such page",
        address="",
        fault=words_of(request)(
            "There is nothing at this address. What you look for may have been renamed or deleted."
        ),
        is_wrong_address=True,
    )
    return HTMLResponse(markup, status_code=404, headers={"cache-control": "no-store"})
