"""The page Train, and what its script asks: what it shows now, to start, the base models, whether one fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import lora_trainer
from lora_trainer.common.errors import LoraTrainError

from .. import bases, command_lines, drafts, slider_words
from ..drafts import Draft
from ..markup import plain
from ..plan_process import BASES
from ..run import starting
from ..series.view import page_url as series_url
from ..server.pages import Body, answer, page, refusal, stamped
from ..server.translation import Words
from ..workplace import Workplace
from . import base_cards as cards_of_bases
from . import fields, view
from .emblem import emblem as emblem_of

Part = Literal["draft", "images", "plan"]
Key = Annotated[str, StringConstraints(max_length=100)]
Id = Annotated[str, StringConstraints(max_length=40)]
Text = Annotated[str, StringConstraints(max_length=20_000)]
Source = Annotated[str, StringConstraints(max_length=300)]

_PARTS = get_args(Part)
# Of the folder launch/cloud/, which a checkout has and a wheel has not.
NOTEBOOKS = {"colab": "Colab", "kaggle": "Kaggle"}
_CLOUD = Path(lora_trainer.__file__).resolve().parents[1] / "launch/cloud"


def _notebook(of: str) -> Path:
    """Return where the notebook for a provider would be."""
    return _CLOUD / f"{of}.ipynb"


class Look(Body):
    """A draft with what was typed since the last answer, and the parts of the page that are to be shown now.

    `typed` are texts by the keys of their fields, `seen` the stamps of the parts that the page shows.
    """

    draft: Id
    typed: dict[Key, Text] = Field(default_factory=dict, max_length=100)
    step: Literal[1, 2] | None = None
    show: list[Part] = Field(default_factory=list, max_length=len(_PARTS))
    seen: dict[Key, Key] = Field(default_factory=dict, max_length=len(_PARTS))


class Start(Body):
    """A draft to be trained, with what was typed since the last answer."""

    draft: Id
    typed: dict[Key, Text] = Field(default_factory=dict, max_length=100)


class Cards(Body):
    """The cards of the base models, for a draft."""

    draft: Id


class Found(Body):
    """The models of other programs on this machine, and of one more folder that was named."""

    named: Annotated[str, StringConstraints(max_length=4096)]


class Fits(Body):
    """Whether a draft would fit on another base."""

    draft: Id
    source: Source


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""
    plans = command_lines.Plans(work)

    def show(request: Request, said: Words) -> Mapping[str, Any] | Response:
        return shown(work, request.query_params, said)

    def look(asked: Look, said: Words) -> Mapping[str, Any]:
        return looked(work, asked, said, plans)

    def start(asked: Start, said: Words) -> Mapping[str, Any]:
        return started(work, asked, said, plans)

    def cards(asked: Cards, said: Words) -> Mapping[str, Any]:
        drafts.read(work, asked.draft)
        return base_cards(work, said)

    def fits(asked: Fits, said: Words) -> Mapping[str, Any]:
        draft = replace(drafts.read(work, asked.draft), base=asked.source)
        return cards_of_bases.verdict(plans, draft, said)

    def found(asked: Found, said: Words) -> Mapping[str, Any]:
        return cards_of_bases.found_models(work, said, named=asked.named)

    def emblem(request: Request) -> Response:
        words = request.query_params
        drawing = emblem_of(words.get("family", "")[:40], words.get("of", ""))
        headers = {"cache-control": "private, max-age=86400"}
        return Response(drawing, media_type="image/svg+xml", headers=headers)

    def notebook(request: Request) -> Response:
        of = request.query_params.get("of", "")
        if of not in NOTEBOOKS or not _notebook(of).is_file():
            return Response(status_code=404)
        return Response(_notebook(of).read_bytes(), media_type="application/x-ipynb+json")

    return [
        page("/train", "train/page.html", title="Train", look=show),
        answer("/train/look", Look, look),
        answer("/train/start", Start, start),
        answer("/train/bases", Cards, cards),
        answer("/train/fits", Fits, fits),
        answer("/train/found", Found, found),
        Route("/train/emblem.svg", emblem),
        Route("/train/notebook", notebook),
    ]


def shown(work: Workplace, asked: Mapping[str, str], said: Words) -> Mapping[str, Any] | Response:
    """Return what the page begins with: the draft that its address asks for, else the newest one."""
    fault = ""
    try:
        draft = view.wanted(work, asked)
    except LoraTrainError as error:
        draft, fault = drafts.current(work), refusal(error, said)["error"]
    if draft.started_as:
        return RedirectResponse(_page_of(draft), status_code=303)
    return {
        "draft": draft,
        "fault_line": fault,
        "fields": fields.FIELDS,
        "texts": fields.texts(draft),
        "brought": view.brought(draft, said),
        "advice": view.advice(),
        "example_slider": slider_words.EXAMPLE,
        "lacks": view.lacks(draft, said),
        "notebooks": {of: NOTEBOOKS[of] for of in NOTEBOOKS if _notebook(of).is_file()},
        "step": draft.step,
        # The report on them takes seconds, in which the page must not look as though they were lost.
        "reads": bool(draft.dataset) and draft.kind != drafts.SLIDER,
        "parts": {"draft": stamped(view.draft_part(work, draft, said))},
    }


def looked(
    work: Workplace, asked: Look, said: Words, plans: command_lines.Plans
) -> Mapping[str, Any]:
    """Keep what was typed; return what was refused of it, and the parts that are others than the page shows."""
    parts: Mapping[Part, Callable[[Workplace, Draft, Words], Any]] = {
        "draft": view.draft_part,
        "images": view.images_part,
        "plan": partial(view.plan_part, plans=plans),
    }
    kept = view.keep(work, asked.draft, asked.typed, step=asked.step)
    found: dict[str, Any] = {"refused": _refused(kept, said)}
    for name, part in parts.items():
        if name in asked.show:
            now = stamped(part(work, drafts.read(work, asked.draft), said))
            if now["stamp"] != asked.seen.get(name):
                found[name] = now
    return found


def started(
    work: Workplace, asked: Start, said: Words, plans: command_lines.Plans
) -> Mapping[str, Any]:
    """Put the training into the queue unless something that was typed is refused; return where its page is."""
    kept = view.keep(work, asked.draft, asked.typed)
    if kept.refused:
        return {"refused": _refused(kept, said)}
    draft = view.start(work, asked.draft, plans=plans)
    return {"refused": {}, "url": _page_of(draft)}


def _page_of(draft: Draft) -> str:
    """Return the page of what a draft was started as."""
    return series_url(draft.series) if draft.series else starting.page_url(draft.id)


def base_cards(work: Workplace, said: Words) -> Mapping[str, Any]:
    """Return the cards of the base models; raises nothing: a refusal is a line under the cards."""
    answered = command_lines.ask(BASES)
    if answered.values is None:
        return {"error": said.message(plain(answered.error))}
    return {
        "cards": cards_of_bases.cards(work, answered.values["releases"], said),
        "choices": bases.choices(said),
        "signed_in": bases.signed_in(),
    }


def _refused(kept: view.Kept, said: Words) -> Mapping[str, str]:
    return {key: said.message(plain(line)) for key, line in kept.refused.items()}
