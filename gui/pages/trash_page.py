"""Deleting with Undo on any page, and the page Trash, which lists what can be put back.

A button has `data-trash` (run, lora or dataset) and `data-ref`; assets/trash.js asks the functions here and
offers Undo. Nothing is gone before somebody empties the trash.
"""

from __future__ import annotations

import time
from typing import Any

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.charts import Html

from .. import trash
from ..markup import button, tag
from ..posted import Posted
from ..workplace import Workplace
from .gradio_events import QUIET, answering, html, module

_MOUNT = module("trash.js", "module.mount(element, server); trigger('click');")
_KINDS = {
    "run": "Training with its LoRAs and samples, deleted {when}",
    "lora": "LoRA file, deleted {when}",
    "dataset": "Images that were uploaded, deleted {when}",
}


def attach(work: Workplace) -> Any:
    """Give a page the deeds of the buttons that delete; return an element whose click comes once they count."""

    def trash_put(posted: Posted) -> dict[str, Any]:
        kind = posted.choice("kind", trash.KINDS)
        thrown = trash.throw_away(work, kind=kind, ref=posted.text("ref"))
        return {"id": thrown.id, "name": thrown.name}

    def trash_back(posted: Posted) -> dict[str, Any]:
        return {"name": trash.put_back(work, posted.text("id", at_most=40)).name}

    def trash_empty(_posted: Posted) -> dict[str, Any]:
        trash.empty(work)
        return {}

    return html(
        html_template=tag("p", class_="trash"),
        js_on_load=_MOUNT,
        server_functions=[answering(act) for act in (trash_put, trash_back, trash_empty)],
    )


def build(work: Workplace) -> None:
    """Lay the page out."""
    html("<h1>Trash</h1>")
    shown = html()
    attach(work).click(lambda: listed(work), None, shown, **QUIET)


def listed(work: Workplace) -> Html:
    """Return what is in the trash, each with a button that puts it back."""
    contents = trash.contents(work)
    if not contents:
        return tag("p", "The trash is empty.", class_="empty")
    size = bytes_text(trash.size_bytes(work))
    said = f"{len(contents)} deleted things, {size}. Nothing is gone until you empty it."
    if len(contents) == 1:
        said = f"1 deleted thing, {size}. Nothing is gone until you empty it."
    return tag(
        "div",
        tag(
            "p",
            said,
            class_="quiet",
        ),
        tag("ul", *map(_row, contents), class_="thrown"),
        tag(
            "p",
            button(
                "Empty the trash",
                icon_name="trash-2",
                kind="danger",
                attributes={"data-empty": "", "data-sure": "Really delete all of it for good?"},
            ),
        ),
    )


def _row(thrown: trash.Thrown) -> Html:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(thrown.thrown_s))
    return tag(
        "li",
        tag(
            "div",
            tag("h2", thrown.name, translate="no"),
            tag("p", _KINDS.get(thrown.kind, "{when}").format(when=when), class_="quiet"),
        ),
        button(
            "Put back",
            icon_name="undo-2",
            attributes={"data-back": thrown.id, "aria-label": f"Put back {thrown.name}"},
        ),
        class_="panel",
    )
