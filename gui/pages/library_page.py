"""The page LoRAs: the grid of all of them, and under `?file=RUN/FILE` everything about one.

Input: the workplace and the page's address. The tabs of the page of one file are in library_*.py.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError

from .. import library, lora_files
from ..markup import error_html
from ..workplace import Workplace
from . import library_describe, library_export, library_tools, library_try, share
from .gradio_events import QUIET, deletes, html
from .library_parts import LibraryTab

ALL_BASES = "all"


def build(work: Workplace) -> None:
    """Lay the page out."""
    with gr.Column() as shelf:
        search, base, grid = _shelf(work)
    with gr.Column(visible=False, elem_classes="lora-page") as detail:
        ref = gr.Textbox(visible=False)
        head = html()
        with gr.Tabs(visible=False) as tabs:
            with gr.Tab("Try"):
                try_it = library_try.build(work, ref)
            with gr.Tab("Describe"):
                describe = library_describe.build(work, ref, head)
            with gr.Tab("Tools"):
                tools = library_tools.build(work, ref)
            with gr.Tab("Export"):
                export = library_export.build(work, ref)
            with gr.Tab("Inside") as inside_tab:
                inside = html(elem_classes="run")
    share.build()
    deletes()
    parts: tuple[LibraryTab, ...] = (try_it, describe, tools, export)
    outputs = [shelf, detail, ref, head, tabs, base, grid]
    outputs += [widget for part in parts for widget in part.outputs]

    def opened(request: gr.Request) -> list[Any]:
        asked = request.query_params.get("file")
        if not asked:
            found = lora_files.entries(work)
            bases = sorted({entry.header.base for entry in found} - {""})
            choices = gr.Dropdown(choices=[("all bases", ALL_BASES), *bases], value=ALL_BASES)
            shown = [gr.Column(visible=True), gr.Column(visible=False), "", "", gr.skip(), choices]
            shown.append(library.grid(found, of=len(found)))
            return shown + [gr.skip() for part in parts for _ in part.outputs]
        shown = [gr.Column(visible=False), gr.Column(visible=True)]
        try:
            file = lora_files.find(work, asked)
        except LoraTrainError as error:
            said = library.missing(str(error))
            shown += ["", said, gr.Tabs(visible=False), gr.skip(), gr.skip()]
            return shown + [gr.skip() for part in parts for _ in part.outputs]
        header = lora_files.read_header(file)
        # A file that cannot be read has no use for any of the tabs.
        readable = gr.Tabs(visible=not header.problem)
        shown += [file.ref, library.head(file, header), readable, gr.skip(), gr.skip()]
        return shown + [value for part in parts for value in part.opened(file, header)]

    gr.on(None, opened, None, outputs, **QUIET)
    inside_tab.select(lambda name: _inside(work, name), ref, inside, **QUIET)


def _shelf(work: Workplace) -> tuple[Any, Any, Any]:
    html("<h1>LoRAs</h1>")
    with gr.Row():
        search = gr.Textbox(
            label="Search",
            placeholder="a name, a trigger word, a base, a note",
            scale=3,
            min_width=200,
        )
        base = gr.Dropdown(
            label="Base model", choices=[("all bases", ALL_BASES)], value=ALL_BASES, min_width=160
        )
    grid = html()

    def filtered(text: str, chosen: str) -> str:
        found = lora_files.entries(work)
        wanted = "" if chosen == ALL_BASES else chosen
        return library.grid(lora_files.matching(found, text, wanted), of=len(found))

    # `input` would miss what is pasted with the mouse.
    gr.on([search.change, base.input], filtered, [search, base], grid, **QUIET)
    return search, base, grid


def _inside(work: Workplace, ref: str) -> str:
    """Read all tensors, which takes a moment for a large file: only where somebody looks."""
    from lora_trainer.lora_file.inspect import inspect_file

    try:
        return library.inside(inspect_file(lora_files.find(work, ref).path))
    except LoraTrainError as error:
        return error_html(str(error))
