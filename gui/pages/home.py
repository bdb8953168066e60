"""The first page: every run as a card, and the way to a new one.

Inputs: the runs folder; the name of a run and what is asked of it. Outputs: cards that follow the
files, requests in control folders, items of the queue.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError

from .. import run_actions, run_cards, state
from ..asset_files import asset
from ..machine_view import machine_line
from ..notices import error_html
from ..workplace import Workplace
from .events import PRIVATE, QUIET

TICK_S = 1.0


def build(work: Workplace) -> None:
    """Lay the page out."""
    page: Any = gr.context.Context.root_block
    machine = gr.HTML(min_height=24)
    with gr.Row():
        gr.Button("Train a LoRA", variant="primary", link="/train", scale=0, min_width=240)
    said = gr.HTML(elem_classes="line")
    cards = gr.HTML(js_on_load=asset("home.js"), elem_id="runs")
    seen = gr.State(())

    def show() -> Any:
        return machine_line(work), run_cards.cards(work), run_cards.stamp(work)

    def tick(stamp: state.Stamp) -> Any:
        now = run_cards.stamp(work)
        return gr.skip() if now == stamp else (run_cards.cards(work), now)

    def act(event: gr.EventData) -> str:
        return asked(work, action=str(event.action), run=str(event.run))

    page.load(show, None, [machine, cards, seen], **PRIVATE)
    cards.click(act, None, said, **PRIVATE)
    gr.Timer(TICK_S).tick(tick, seen, [cards, seen], **QUIET)


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
