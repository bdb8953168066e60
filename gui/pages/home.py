"""The first page: the example for whoever has no run yet, else every run, and a place for images.

Inputs: the runs folder; the name of a run and what is asked of it. Outputs: cards that follow the
files (`/live`, see server/startup.py), requests in control folders, items of the queue.
"""

from __future__ import annotations

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.hardware.machine import detect

from .. import home_view, run_actions
from ..markup import error_html
from ..state import Followed
from ..workplace import Workplace
from .gradio_events import PRIVATE, deletes, html, module

_MOUNT = module("home.js", 'module.mount(element, (asked) => trigger("click", asked));')


def build(work: Workplace) -> None:
    """Lay the page out."""
    page = html(
        home_view.page(work, Followed(), detect()),
        js_on_load=_MOUNT,
        elem_id="runs",
    )
    said = html(elem_classes="line")
    deletes()

    def act(event: gr.EventData) -> str:
        return asked(work, action=str(event.action), run=str(event.run))

    page.click(act, None, said, **PRIVATE)


def asked(work: Workplace, *, action: str, run: str) -> str:
    """Do what a button of a card asks for; return the refusal as markup, or nothing."""
    try:
        if action == "stop":
            run_actions.ask(work, run, "stop")
        elif action == "resume":
            run_actions.resume(work, run)
    except LoraTrainError as error:
        return error_html(str(error))
    return ""
