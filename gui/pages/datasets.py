"""The page Datasets: the captions and images of a folder, drawn and edited by assets/datasets.js."""

from __future__ import annotations

from ..markup import drop_zone
from ..server.asset_files import asset
from ..workplace import Workplace
from .gradio_events import deletes, html

SCRIPTS = (
    "dataset_dom.js",
    "dataset_ask.js",
    "dataset_card.js",
    "dataset_bulk.js",
    "dataset_caption.js",
    "dataset_tools.js",
    "datasets.js",
)


def build(_work: Workplace) -> None:
    """Lay the page out."""
    html("<h1>Datasets</h1>")
    html(drop_zone())
    html(
        html_template='<div class="mount"></div>',
        js_on_load="\n".join(map(asset, SCRIPTS)),
    )
    deletes()
