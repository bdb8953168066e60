"""The page Datasets, and what scripts ask of a dataset folder: one route each, for every page that shows its images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from ..server.pages import Body, answer, page
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace
from . import requests
from .api import DatasetApi
from .findings import IN_SIGHT, all_are_pairs, remarks
from .spoken import in_language
from .view import is_warned_of, verdict

Asked = TypeVar("Asked", bound=Body)


def routes(work: Workplace) -> list[Route]:
    """Return the routes."""
    api = DatasetApi(work=work)

    def remarks_on(asked: requests.Folder, _: Words) -> Mapping[str, Any]:
        score, found = api.findings(asked)
        listed = remarks(found, _, of_pairs=any(map(all_are_pairs, found)))
        return {
            "findings": render("datasets/remarks.html", _, remarks=listed, most=IN_SIGHT),
            "verdict": _(verdict(score, found)),
            "good": not is_warned_of(found),
        }

    def undo(asked: requests.Undo, _: Words) -> Mapping[str, Any]:
        return in_language(api.undo(asked, said=_.message), _)

    return [
        page("/datasets", "datasets/page.html", title="Datasets", look=_look),
        _route("recent", requests.Recent, api.recent),
        _route("glance", requests.Folder, api.glance),
        _route("look", requests.Look, api.look),
        _route("check", requests.Folder, api.check),
        answer("/datasets/findings", requests.Folder, remarks_on),
        _route("use_masks", requests.Folder, api.use_masks),
        _route("save", requests.Save, api.save),
        _route("preview", requests.Preview, api.preview),
        _route("apply", requests.Apply, api.apply),
        answer("/datasets/undo", requests.Undo, undo),
        _route("redo", requests.Folder, api.redo),
        _route("exclude", requests.Pictures, api.exclude),
        _route("keep_one", requests.KeepOne, api.keep_one),
        _route("put_back", requests.Pictures, api.put_back),
        _route("closer", requests.Picture, api.closer),
        _route("subject", requests.Picture, api.subject),
        _route("mask", requests.Mask, api.mask),
        _route("crop", requests.Crop, api.crop),
        _route("caption", requests.Caption, api.caption),
        _route("caption_names", requests.Folder, api.caption_names),
        _route("caption_state", requests.Folder, api.caption_state),
        _route("caption_stop", requests.Folder, api.caption_stop),
        _route("caption_undo", requests.Folder, api.caption_undo),
    ]


def _look(request: Request, _: Words) -> Mapping[str, Any]:
    """Return what the page shows before its script asks for a folder."""
    return {"is_open": bool(request.query_params.get("folder"))}


def _route(name: str, body: type[Asked], act: Callable[[Asked], dict[str, Any]]) -> Route:
    def asked_in(asked: Asked, _: Words) -> Mapping[str, Any]:
        return in_language(act(asked), _)

    return answer(f"/datasets/{name}", body, asked_in)
