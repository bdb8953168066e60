"""What scripts ask of a dataset folder: one route each, for every page that shows its images."""

from __future__ import annotations

from starlette.routing import Route

from ..server.pages import answer
from ..workplace import Workplace
from . import requests
from .api import DatasetApi


def routes(work: Workplace) -> list[Route]:
    """Return the routes."""
    api = DatasetApi(work=work)
    return [
        answer("/datasets/recent", requests.Recent, lambda asked, _: api.recent(asked)),
        answer("/datasets/look", requests.Look, lambda asked, _: api.look(asked)),
        answer("/datasets/check", requests.Folder, lambda asked, _: api.check(asked)),
        answer("/datasets/save", requests.Save, lambda asked, _: api.save(asked)),
        answer("/datasets/preview", requests.Preview, lambda asked, _: api.preview(asked)),
        answer("/datasets/apply", requests.Apply, lambda asked, _: api.apply(asked)),
        answer("/datasets/undo", requests.Folder, lambda asked, _: api.undo(asked)),
        answer("/datasets/redo", requests.Folder, lambda asked, _: api.redo(asked)),
        answer("/datasets/exclude", requests.Pictures, lambda asked, _: api.exclude(asked)),
        answer("/datasets/put_back", requests.Pictures, lambda asked, _: api.put_back(asked)),
        answer("/datasets/closer", requests.Picture, lambda asked, _: api.closer(asked)),
        answer("/datasets/mask", requests.Mask, lambda asked, _: api.mask(asked)),
        answer("/datasets/caption", requests.Caption, lambda asked, _: api.caption(asked)),
        answer(
            "/datasets/caption_state", requests.Folder, lambda asked, _: api.caption_state(asked)
        ),
        answer("/datasets/caption_stop", requests.Folder, lambda asked, _: api.caption_stop(asked)),
        answer("/datasets/caption_undo", requests.Folder, lambda asked, _: api.caption_undo(asked)),
    ]
