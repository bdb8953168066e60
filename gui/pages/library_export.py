"""The tab Export: what others will miss, then file, preview and card in one folder."""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.lora_file.inspect import inspect_file

from .. import library, sharing
from ..lora_files import Header, LoraFile, find
from ..markup import error_html
from ..media import EXPORTS
from ..workplace import Workplace
from .gradio_events import QUIET, html
from .library_parts import LibraryTab


def build(work: Workplace, ref: Any) -> LibraryTab:
    """Lay the tab out."""
    gr.Markdown(
        "For A1111, Forge, ComfyUI and Civitai: the LoRA, its preview, and the card that A1111 and "
        "Forge read (trigger words, weight, description)."
    )
    weight = gr.Slider(
        label="Preferred strength",
        info="A1111 and Forge put it into the prompt",
        minimum=0,
        maximum=2,
        step=0.05,
        value=1.0,
    )
    notes = gr.Textbox(label="Notes", info="on the card only", lines=2)
    folder = gr.Textbox(
        label="Folder",
        info="empty: the folder export of the run; or your program's folder of LoRAs",
    )
    with gr.Row():
        check = gr.Button("Check only", min_width=140, scale=0)
        go = gr.Button("Check and export", variant="primary", min_width=190, scale=0)
    said = html()

    def checked(name: str) -> str:
        try:
            file = find(work, name)
            found = sharing.remarks(inspect_file(file.path), preview=library.preview_of(file))
        except LoraTrainError as error:
            return error_html(str(error))
        return sharing.remarks_html(found)

    def exported(name: str, weight: float, notes: str, typed: str) -> str:
        try:
            return _export(work, find(work, name), weight=weight, notes=notes, folder=typed)
        except LoraTrainError as error:
            return error_html(str(error))

    check.click(checked, ref, said, **QUIET)
    go.click(exported, [ref, weight, notes, folder], said, **QUIET)

    def opened(file: LoraFile, header: Header) -> list[Any]:
        return ["", 1.0]

    return LibraryTab(outputs=[said, weight], opened=opened)


def _export(work: Workplace, file: LoraFile, *, weight: float, notes: str, folder: str) -> str:
    target = file.path.parent / EXPORTS
    if folder.strip():
        target = work.path(folder, what="a folder for the files")
    done, found = sharing.export_checked(file, target, weight=weight, notes=notes)
    return sharing.exported_html(file, done) + sharing.remarks_html(found)
