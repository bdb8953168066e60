"""The page Trash, which lists what can be put back, and the deeds of the buttons that delete on any page.

A button has `data-trash` (run, lora or dataset) and `data-ref`; script.js asks here and offers Undo. Nothing is gone
before somebody empties the trash.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints
from starlette.routing import Route

from ..clock import moment_text
from ..media import thumb_url
from ..server.pages import Body, Nothing, Text, answer, page
from ..server.translation import Words
from ..workplace import Workplace
from . import store

KINDS = {
    "run": "Training with its LoRAs and samples",
    "lora": "LoRA file",
    "dataset": "Images that were uploaded",
}
_PICTURE_PX = 192


class Put(Body):
    """What is to be deleted: `ref` names it among its kind."""

    kind: Literal["run", "lora", "dataset"]
    ref: Text


class Back(Body):
    """What is to come back."""

    id: Annotated[str, StringConstraints(max_length=40)]


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of the buttons."""

    def put(asked: Put, said: Words) -> Mapping[str, Any]:
        thrown = store.throw_away(work, kind=asked.kind, ref=asked.ref)
        return {"id": thrown.id, "name": called(thrown, said)}

    def back(asked: Back, said: Words) -> Mapping[str, Any]:
        return {"name": called(store.put_back(work, asked.id), said)}

    def empty(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        store.empty(work)
        return {}

    return [
        page(
            "/trash",
            "trash/page.html",
            title="Trash",
            look=lambda _request, said: listed(work, said),
        ),
        answer("/trash/put", Put, put),
        answer("/trash/back", Back, back),
        answer("/trash/empty", Nothing, empty),
    ]


def called(thrown: store.Thrown, said: Words) -> str:
    """Return what its own page called it: a heap of photos after the first, "IMG_2000 and 18 more"."""
    return (
        f"{thrown.name} {said('and {#} more', f'{thrown.others:,}')}"
        if thrown.others
        else thrown.name
    )


def listed(work: Workplace, said: Words) -> Mapping[str, Any]:
    """Return what the page shows: the newest deletion first."""
    things: list[dict[str, Any]] = [
        {
            "id": thrown.id,
            "kind": KINDS.get(thrown.kind, ""),
            "name": called(thrown, said),
            "picture": small_url(store.picture(work, thrown)),
            "size_bytes": store.size_bytes(work, thrown),
            "when": said.message(moment_text(thrown.thrown_s)),
        }
        for thrown in store.contents(work)
    ]
    return {"things": things, "size_bytes": sum(thing["size_bytes"] for thing in things)}


def small_url(picture: Path | None) -> str:
    """Return the address of a small copy of a picture, an empty text without one."""
    return thumb_url(picture.parent, picture.name, size_px=_PICTURE_PX) if picture else ""
