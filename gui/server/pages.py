"""How a page is served, and how it is answered when its script asks.

A page is a template that extends shared/page.html; its script asks by `ask(path, body)` of shared/ask.js, and each such
path is one route made by `answer`. Inputs: requests. Outputs: pages in the language of the request, JSON objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from lora_trainer import __version__
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.files import disk_error

from ..markup import PLACES, plain
from . import language
from .templates import render
from .translation import Words, words


class Body(BaseModel):
    """What a page's script sends: every value of its kind, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Nothing(Body):
    """What is asked needs no more words."""


Asked = TypeVar("Asked", bound=Body)
Text = Annotated[str, StringConstraints(max_length=4096)]
"""A name, a path or a line of text, as a script sends it."""


def words_of(request: Request) -> Words:
    """Return the texts in the language of a request."""
    return words(language.wanted(request.headers))


def page(
    path: str,
    template: str,
    *,
    title: str,
    look: Callable[[Request, Words], Mapping[str, Any] | Response],
) -> Route:
    """Return the route of a page: `look` returns what its template shows, or an answer; its refusal is a page too."""

    def show(request: Request) -> Response:
        said = words_of(request)
        shown: Mapping[str, Any] | Response
        try:
            shown, name = look(request, said), template
        except LoraTrainError as error:
            shown, name = {"fault": refusal(error, said)["error"]}, "shared/fault.html"
        if isinstance(shown, Response):
            return shown
        markup = draw(request, name, title=title, address=path, **shown)
        return HTMLResponse(markup, headers={"cache-control": "no-store"})

    return Route(path, show)


def draw(request: Request, template: str, *, title: str, address: str, **shown: Any) -> str:
    """Return a whole page in the language of a request; `address` is of the place that the bar marks."""
    frame = {
        "title": title,
        "places": PLACES,
        "languages": language.languages(),
        "version": __version__,
    }
    return render(template, words_of(request), address=address, **frame, **shown)


def answer(path: str, body: type[Asked], act: Callable[[Asked, Words], Mapping[str, Any]]) -> Route:
    """Return the route of one thing that a script may ask; a refusal is an answer too: `{"error": ...}`.

    A body that no script of ours sends is refused with 400.
    """

    async def serve(request: Request) -> Response:
        try:
            asked = body.model_validate_json(await request.body())
        except ValueError:
            return JSONResponse({"error": "load the page again"}, status_code=400)
        return JSONResponse(await run_in_threadpool(answered, asked, words_of(request)))

    def answered(asked: Asked, said: Words) -> Mapping[str, Any]:
        try:
            return act(asked, said)
        except LoraTrainError as error:
            return refusal(error, said)

    return Route(path, serve, methods=["POST"])


def refusal(error: LoraTrainError, said: Words) -> Mapping[str, str]:
    """Return an error of the trainer as the answer that a script shows."""
    return {"error": said.message(plain(str(error)))}


def attempted(
    act: Callable[[], Mapping[str, Any]], said: Words, *, folder: Path
) -> Mapping[str, Any]:
    """Return what a button came to: the answer of `act`, or its refusal; `folder` is where a disk may refuse.

    For an answer that shows more than that, such as the list in which the button is.
    """
    try:
        return act()
    except LoraTrainError as error:
        return refusal(error, said)
    except OSError as error:
        return refusal(disk_error(folder, error), said)


def stamped(part: Any) -> dict[str, Any]:
    """Return a part as plain values, with a stamp that is another when they are."""
    values = asdict(part)
    text = json.dumps(values, sort_keys=True)
    return {"stamp": hashlib.sha256(text.encode()).hexdigest()[:16], **values}
