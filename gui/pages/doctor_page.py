"""The page Machine: what this machine has, what is missing, where things lie, and the cache.

Input: the workplace. The page looks when it is opened; only the cache can be changed here.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.hardware.machine import detect
from lora_trainer.reporting.charts import Html

from .. import doctor
from ..markup import error_html, note_html, tag
from ..workplace import Workplace
from .gradio_events import PRIVATE, QUIET, html


def build(work: Workplace) -> None:
    """Lay the page out."""
    html("<h1>Machine</h1>")
    report = html("<p>Looking\u2026</p>", elem_classes="doctor")
    ask = gr.Button("Clear the cache\u2026", scale=0, min_width=180)
    with gr.Column(visible=False) as confirm:
        asked = html()
        with gr.Row():
            yes = gr.Button("Clear it", variant="stop", scale=0, min_width=140)
            no = gr.Button("Keep it", scale=0, min_width=140)
    said = html(elem_classes="line")

    def question() -> list[Any]:
        cache = doctor.cache_state()
        shown = note_html(doctor.question(cache))
        return [gr.Column(visible=True), shown, gr.Button(visible=cache.files > 0), ""]

    def cleared() -> list[Any]:
        try:
            line = note_html(doctor.cleared_text(*doctor.clear_cache(work)))
        except LoraTrainError as error:
            line = error_html(str(error))
        return [gr.Column(visible=False), line, look(work)]

    gr.on(None, lambda: look(work), None, report, **QUIET)
    ask.click(question, None, [confirm, asked, yes, said], **QUIET)
    yes.click(cleared, None, [confirm, said, report], show_progress="hidden", **PRIVATE)
    no.click(lambda: gr.Column(visible=False), None, confirm, **QUIET)


def look(work: Workplace) -> Html:
    """Return the whole report as it is now."""
    found, links = detect(), doctor.hub()
    return tag(
        "div",
        doctor.machine(found),
        doctor.packages(found),
        doctor.folders(work, doctor.cache_state(), links),
        doctor.network(links),
        doctor.versions(),
    )
