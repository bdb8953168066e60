"""What is answered where lora-train itself is at fault: what happened, what to do, and the lines for a report.

Input: an ASGI application that may raise anything. Output: its answer, or the page of a fault, or for a script
{error}. The fault is raised again, so that the server writes it into its terminal as before.
"""

from __future__ import annotations

import asyncio
import traceback

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from lora_trainer.common.wording import one_line, without_secrets

from .guard import Application, Message, Receive, Send
from .pages import draw, words_of

_LAST_CHARACTERS = 8_000


class Faults:
    """ASGI middleware around the routes."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as fault:
            if scope["type"] == "http" and not has_begun:
                answer = await asyncio.to_thread(_answer, Request(scope), fault)
                await answer(scope, receive, send)
            raise


def _answer(request: Request, fault: Exception) -> Response:
    """Return what whoever asked is shown of a fault."""
    said = words_of(request)
    name = one_line(without_secrets(f"{type(fault).__name__}: {fault}"))
    told = said("A fault of lora-train or of a library it uses: {}", name)
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"error": told}, status_code=500)
    lines = without_secrets("".join(traceback.format_exception(fault)))[-_LAST_CHARACTERS:]
    markup = draw(
        request,
        "shared/fault.html",
        title="Something went wrong",
        address="",
        fault=told,
        lines=lines,
    )
    return HTMLResponse(markup, status_code=500, headers={"cache-control": "no-store"})
