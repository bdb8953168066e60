"""The page Queue: trainings in their order, one after another on each card.

Inputs: the items of the queue; a button's item and what is asked of it. Outputs: lists that follow
the files, and a worker where something waits and none lives.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import MachineError
from lora_trainer.queue import commands

from .. import queue_view
from ..asset_files import asset
from ..markup import error_html
from ..state import Stamp
from ..workplace import Workplace
from .gradio_events import PRIVATE, QUIET, html

TICK_S = 1.0


def build(work: Workplace) -> None:
    """Lay the page out."""
    page: Any = gr.context.Context.root_block
    html("<h1>Queue</h1>")
    said = html(elem_classes="line")
    queue = html(js_on_load=asset("queue.js"), elem_id="queue")
    gr.Button("Train a LoRA", variant="primary", link="/train", scale=0, min_width=240)
    seen = gr.State(())

    def tick(stamp: Stamp) -> Any:
        return shown(work, stamp)

    def act(event: gr.EventData) -> list[Any]:
        answer = queue_view.asked(work, action=str(event.action), id=str(event.id))
        return [answer, *shown(work, ())]

    page.load(tick, seen, [queue, seen], **PRIVATE)
    queue.click(
        act,
        None,
        [said, queue, seen],
        show_progress="hidden",
        trigger_mode="multiple",  # else a second key press is lost while the first is under way
        **PRIVATE,
    )
    gr.Timer(TICK_S).tick(tick, seen, [queue, seen], **QUIET)


def shown(work: Workplace, stamp: Stamp) -> Any:
    """Return the queue and its stamp where it has changed; a queue nobody works through gets a worker."""
    try:
        commands.ensure_worker(work.runs)
        now = queue_view.stamp(work)
        return gr.skip() if now == stamp else [queue_view.view(work), now]
    except MachineError as error:
        return [error_html(str(error)), ("error",)]
