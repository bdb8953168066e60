"""The page Series: several trainings that differ by some settings, beside each other.

/series               all series and studies
/series?id=ID         the trainings of one press on Train
/series?study=NAME    the trials of a study of `lora-train tune`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from ..server.pages import Body, Text, answer, page
from ..server.translation import Words
from ..workplace import Workplace
from . import view

Answer = Mapping[str, Any]


class Look(Body):
    """A series or a study, and the stamp of what its page shows."""

    id: Text
    study: Text
    stamp: Text


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
    now = _now(work, view.named(work, series=asked.id, study=asked.study), _)
    return {"goes": now["goes"]} if now["stamp"] == asked.stamp else now


def _now(work: Workplace, found: view.Named, _: Words) -> Answer:
    html, goes = view.members(work, found, _)
    stamp = hashlib.sha256(html.encode()).hexdigest()[:16]
    return {"stamp": stamp, "goes": goes, "html": html}
