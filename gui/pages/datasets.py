"""The page Datasets: the captions and images of a folder, drawn and edited by assets/datasets.js."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lora_trainer.common.errors import LoraTrainError

from ..asset_files import asset
from ..dataset_desk import DatasetDesk
from ..posted import Posted
from ..workplace import Workplace
from .gradio_events import html

SCRIPTS = (
    "dataset_dom.js",
    "dataset_card.js",
    "dataset_bulk.js",
    "dataset_caption.js",
    "dataset_tools.js",
    "datasets.js",
)
Answer = Callable[[Any], dict[str, Any]]


def build(work: Workplace) -> None:
    """Lay the page out."""
    desk = DatasetDesk(work=work)
    html("<h1>Datasets</h1>")
    html(
        html_template='<div class="mount"></div>',
        js_on_load="\n".join(map(asset, SCRIPTS)),
        server_functions=[
            _answering("dataset_apply", desk.apply),
            _answering("dataset_caption", desk.caption),
            _answering("dataset_caption_state", desk.caption_state),
            _answering("dataset_caption_stop", desk.caption_stop),
            _answering("dataset_caption_undo", desk.caption_undo),
            _answering("dataset_check", desk.check),
            _answering("dataset_exclude", desk.exclude),
            _answering("dataset_look", desk.look),
            _answering("dataset_preview", desk.preview),
            _answering("dataset_put_back", desk.put_back),
            _answering("dataset_recent", desk.recent),
            _answering("dataset_redo", desk.redo),
            _answering("dataset_save", desk.save),
            _answering("dataset_undo", desk.undo),
        ],
    )


def _answering(name: str, act: Callable[[Posted], dict[str, Any]]) -> Answer:
    """Return a function for the script: it takes one object, and a refusal is an answer too."""

    def answer(values: Any) -> dict[str, Any]:
        try:
            return act(Posted.of(values))
        except LoraTrainError as error:
            return {"error": str(error)}

    answer.__name__ = name
    return answer
