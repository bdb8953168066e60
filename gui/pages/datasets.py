"""The page Datasets: the captions and images of a folder, drawn and edited by assets/datasets.js."""

from __future__ import annotations

from ..dataset_desk import DatasetDesk
from ..markup import drop_zone
from ..server.asset_files import asset
from ..workplace import Workplace
from .gradio_events import answering, deletes, html
from .share import browsing

SCRIPTS = (
    "dataset_dom.js",
    "dataset_ask.js",
    "dataset_card.js",
    "dataset_bulk.js",
    "dataset_caption.js",
    "dataset_tools.js",
    "datasets.js",
)
# What the script asks of the desk, there as dataset_NAME.
ASKED = (
    *("apply", "caption", "caption_state", "caption_stop", "caption_undo", "check", "closer"),
    *("exclude", "mask"),
    *("look", "preview", "put_back", "recent", "redo", "save", "undo"),
)


def build(work: Workplace) -> None:
    """Lay the page out."""
    desk = DatasetDesk(work=work)
    html("<h1>Datasets</h1>")
    html(drop_zone())
    html(
        html_template='<div class="mount"></div>',
        js_on_load="\n".join(map(asset, SCRIPTS)),
        server_functions=[
            *(answering(getattr(desk, name), f"dataset_{name}") for name in ASKED),
            *browsing(work),
        ],
    )
    deletes()
