"""The page All settings, and what its script asks: a draft as it is now, changes to it, what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.files import disk_error

from .. import drafts
from ..command_lines import Plans
from ..markup import inline
from ..server.pages import Body, answer, page
from ..server.translation import Words
from ..workplace import Workplace
from . import view
from .api import Api
from .requests import Bring, Change, Keep, Load, Look, OfDraft, Replace, Reset

Asked = TypeVar("Asked", bound=Body)


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""

    def show(request: Request, said: Words) -> Mapping[str, Any]:
        """Show the draft that the address names, else the one that somebody works on."""
        named = request.query_params.get("draft", "")
        if named == "new":
            draft = next(
                (each for each in drafts.waiting(work, within=1) if not each.is_given), None
            )
            draft = draft or drafts.new(work)
        else:
            draft = drafts.read(work, named) if named else drafts.current(work, is_last=True)
        return {
            "sections": view.form(said.code),
            "state": view.state(work, draft),
            "drafts": view.offered(work, draft),
            "inline": inline,
        }

    return [
        page("/settings", "settings/page.html", title="All settings", look=show),
        *answers(Api(work=work, plans=Plans(work))),
    ]


def answers(api: Api) -> list[Route]:
    """Return what the script may ask."""

    def route(
        path: str, body: type[Asked], act: Callable[[Asked, Words], Mapping[str, Any]]
    ) -> Route:
        def served(asked: Asked, said: Words) -> Mapping[str, Any]:
            try:
                return act(asked, said)
            except LoraTrainError as error:
                return view.refusal(error, said)
            except OSError as error:
                return view.refusal(disk_error(api.work.own, error), said)

        return answer(f"/settings/{path}", body, served)

    return [
        route("look", Look, api.look),
        route("change", Change, api.change),
        route("reset", Reset, api.reset),
        route("replace", Replace, api.replace),
        route("bring", Bring, api.bring),
        route("plan", OfDraft, api.plan),
        route("command", OfDraft, api.command),
        route("keep", Keep, api.keep),
        route("load", Load, api.load),
    ]
