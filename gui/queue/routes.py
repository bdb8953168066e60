"""The page Queue, and what its script asks: how the lists are now, and what its buttons do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.errors import RequestError
from lora_trainer.hardware.machine import detect
from lora_trainer.queue import notices, rules, worker

from ..server.pages import Body, Text, answer, attempted, page
from ..server.translation import Words
from ..workplace import Workplace
from . import view
from .times import Times


class Press(Body):
    """A button of the lists: what is asked of which item."""

    action: Text
    id: Text
    place: int | None = None


class When(Body):
    """When trainings may start; the night is from one hour of the day to another."""

    when: Literal["always", "idle", "night"]
    night_from: int
    night_to: int


class Look(Body):
    """How the lists are, once a button has done what it is for; `stamp` is of those that the page shows."""

    stamp: Text
    press: Press | None = None
    rules: When | None = None


class Told(Body):
    """Where notices go; an empty password stays as it was. `test` sends one."""

    ntfy: Text
    webhook: Text
    email_to: Text
    smtp_server: Text
    smtp_port: int
    smtp_user: Text
    smtp_password: Text
    test: bool


class Waiting(Body):
    """How long what waits takes."""


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""

    times = Times(work=work, devices=lambda: len(worker.slots(detect(), os.environ)))

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        worker.ensure_worker(work.runs)
        goes = view.goes(work)  # before the stamp, see `changed`
        return {
            "stamp": stamp_text(work),
            "goes": goes,
            "notices": None if work.roots is not None else notices.read_notices(),
            **view.shown(work, _),
        }

    def look(asked: Look, _: Words) -> Mapping[str, Any]:
        done = pressed(work, asked.press, _) if asked.press else {}
        if asked.rules is not None:
            done = ruled(work, asked.rules, _)
        return {**done, **changed(work, asked.stamp, _)}

    return [
        page("/queue", "queue/page.html", title="Queue", look=show),
        answer("/queue/look", Look, look),
        answer("/queue/notices", Told, lambda asked, _: told(work, asked, _)),
        answer("/queue/times", Waiting, lambda asked, _: asdict(times.of_waiting(_))),
    ]


def pressed(work: Workplace, button: Press, _: Words) -> Mapping[str, Any]:
    """Do what a button is for; return what was done, or why not."""

    def act() -> Mapping[str, Any]:
        done = view.press(work, action=button.action, id=button.id, said=_, place=button.place)
        return {"done": done}

    return attempted(act, _, folder=work.runs)


def ruled(work: Workplace, asked: When, _: Words) -> Mapping[str, Any]:
    """Keep when trainings may start; return what was done, or why not."""

    def act() -> Mapping[str, Any]:
        night = (asked.night_from, asked.night_to)
        rules.change_when(work.runs, when=asked.when, night=night)
        return {"done": _("Kept.")}

    return attempted(act, _, folder=work.runs)


def told(work: Workplace, asked: Told, _: Words) -> Mapping[str, Any]:
    """Keep where notices go, and send one to try; raises RequestError, MachineError."""
    if work.roots is not None:
        raise RequestError(
            "notices are set on the machine itself: this server is one that others reach",
            fix="open these pages there without --listen and --datasets, or write notices.json",
        )
    values = asked.model_dump(exclude={"test"})
    values["smtp_password"] = asked.smtp_password or notices.read_notices().smtp_password
    kept = notices.keep_notices({name: _stripped(value) for name, value in values.items()})
    if not asked.test:
        return {"done": _("Kept.")}
    if not kept.is_any:
        raise RequestError("no way is filled in", fix="fill in one")
    trial = notices.Notice(
        title=_("A notice of lora-train"), message=_("Trainings that end are told like this.")
    )
    failed = notices.send(kept, trial)
    if failed:
        return {"error": "; ".join(failed)}
    return {"done": _("Kept, and sent. If nothing arrives, look at the fields once more.")}


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


def changed(work: Workplace, stamp: str, _: Words) -> Mapping[str, Any]:
    """Return whether to go on asking, and the lists where they have changed.

    A queue nobody works through gets a worker. Raises MachineError.
    """
    worker.ensure_worker(work.runs)
    # Before the stamp: what ends between the two is asked for once more. The other way round the page would be told
    # that nothing goes on any more, and would show for ever what it showed before.
    goes = view.goes(work)
    now = {"goes": goes, "stamp": stamp_text(work)}
    if now["stamp"] == stamp:
        return {"goes": now["goes"]}
    return {**now, "html": view.view(work, _)}


def stamp_text(work: Workplace) -> str:
    """Return a text that changes when the lists do."""
    return f"{hash(view.stamp(work)):x}"
