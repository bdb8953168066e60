"""The page Series: several trainings that differ by some settings, beside each other.

/series               all series and studies
/series?id=ID         the trainings of one press on Train
/series?study=NAME    the trials of a study of `lora-train tune`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.queue import commands, worker

from ..server.pages import Body, Text, answer, attempted, page
from ..server.translation import Words
from ..variants import MAX_TRAININGS
from ..workplace import Workplace
from . import view

Answer = Mapping[str, Any]
_Items = Annotated[list[Text], Field(max_length=MAX_TRAININGS)]


class Look(Body):
    """A series or a study once a button has done what it is for, and the stamp of what its page shows.

    `remove` are items that are taken off the queue, `back` those that come into it again.
    """

    id: Text
    study: Text
    stamp: Text
    remove: _Items = []
    back: _Items = []


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""
    return [
        page(view.PAGE, "series/page.html", title="Series", look=partial(shown, work)),
        answer(f"{view.PAGE}/look", Look, partial(look, work)),
    ]


def shown(work: Workplace, request: Request, _: Words) -> Answer:
    """Return what the page shows: all series, or one."""
    asked = {name: request.query_params.get(name, "") for name in ("id", "study")}
    if not any(asked.values()):
        return {"part": "list", **view.shelf(work, _)}
    found = view.named(work, series=asked["id"], study=asked["study"])
    return {"part": "one", "asked": asked, "label": found.label, "now": _now(work, found, _)}


def look(work: Workplace, asked: Look, _: Words) -> Answer:
    """Return the trainings of a series where they have changed."""

    def act() -> Answer:
        for item in asked.remove:
            commands.remove(work.runs, item)
        for item in asked.back:
            commands.put_back(work.runs, item)
        worker.ensure_worker(work.runs)
        return {}

    done = attempted(act, _, folder=work.runs) if asked.remove or asked.back else {}
    now = _now(work, view.named(work, series=asked.id, study=asked.study), _)
    return {**done, **({"goes": now["goes"]} if now["stamp"] == asked.stamp else now)}


def _now(work: Workplace, found: view.Named, _: Words) -> Answer:
    html, goes = view.members(work, found, _)
    stamp = hashlib.sha256(html.encode()).hexdigest()[:16]
    return {"stamp": stamp, "goes": goes, "html": html}
