"""The page Home, and what its script asks: how the cards are now, and what their buttons do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.hardware.machine import detect

from .. import run_actions
from ..runs import Followed, find_runs
from ..server.pages import Body, Text, answer, attempted, page
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace
from . import view


class Press(Body):
    """A button of a card; `run` is its run, of one to withdraw its item of the queue."""

    action: Literal["stop", "resume", "withdraw"]
    run: Text


class Look(Body):
    """How the cards are, once a button has done what it is for; `stamp` is of those that the page shows."""

    stamp: Text
    press: Press | None = None


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""
    followed = Followed()

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        has_queued = view.has_queued(work)
        entries = find_runs(work.runs)
        return {
            "stamp": view.stamp(work, entries),
            "goes": view.goes(entries, has_queued=has_queued),
            "machine": view.machine_line(work, detect(), _),
            **view.shown(work, followed, _, entries),
        }

    def look(asked: Look, _: Words) -> Mapping[str, Any]:
        refused = pressed(work, asked.press, _) if asked.press else {}
        # Each before what follows: what changes between them is drawn again, not missed.
        has_queued = view.has_queued(work)
        entries = find_runs(work.runs)
        stamp, goes = view.stamp(work, entries), view.goes(entries, has_queued=has_queued)
        if stamp == asked.stamp:
            return {**refused, "goes": goes}
        html = render("home/cards.html", _, **view.shown(work, followed, _, entries))
        return {**refused, "goes": goes, "stamp": stamp, "html": html}

    return [
        page("/", "home/page.html", title="Home", look=show),
        answer("/home/look", Look, look),
    ]


def pressed(work: Workplace, button: Press, _: Words) -> Mapping[str, Any]:
    """Do what a button is for; return why not, or nothing."""

    def act() -> Mapping[str, Any]:
        if button.action == "stop":
            run_actions.ask(work, button.run, "stop")
        elif button.action == "withdraw":
            run_actions.withdraw(work, button.run)
        else:
            run_actions.resume(work, button.run)
        return {}

    return attempted(act, _, folder=work.runs)
