"""The page Queue: trainings in their order, one after another on each card.

Inputs: the items of the queue; a button's item and what is asked of it. Outputs: lists that follow
the files, and a worker where something waits and none lives.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import MachineError
from lora_trainer.queue import commands, worker

from .. import queue_view
from ..asset_files import asset
from ..markup import error_html
from ..state import Stamp
from ..workplace import Workplace
from .gradio_events import TICK_S, html, in_turn, looked_at


def build(work: Workplace) -> None:
    """Lay the page out. It asks once a second while something trains or waits, else when looked at."""
    page: Any = gr.context.Context.root_block
    html("<h1>Queue</h1>")
    said = html(elem_classes="line")
    queue = html(js_on_load=asset("queue.js"), elem_id="queue")
    gr.Button("Train a LoRA", variant="primary", link="/train", scale=0, min_width=240)
    back = looked_at()
    seen, timer = gr.State(()), gr.Timer(TICK_S)
    outputs = [queue, seen, timer]

    def tick(stamp: Stamp) -> Any:
        return shown(work, stamp)

    def act(event: gr.EventData) -> list[Any]:
        answer = queue_view.asked(work, action=str(event.action), id=str(event.id))
        return [answer, *shown(work, ())]

    queue.click(
        act,
        None,
        [said, *outputs],
        trigger_mode="multiple",  # else a second key press is lost while the first is under way
        **in_turn("queue"),
    )
    gr.on([page.load, timer.tick, back.click], tick, seen, outputs, **in_turn("queue"))


def shown(work: Workplace, stamp: Stamp) -> Any:
    """Return the queue, its stamp and whether to go on asking, where it has changed.

    A queue nobody works through gets a worker.
    """
    try:
        worker.ensure_worker(work.runs)
        now = queue_view.stamp(work)
        if now == stamp:
            return gr.skip()
        goes = any(not item.has_ended for item in commands.items(work.runs))
        return [queue_view.view(work), now, gr.Timer(active=goes)]
    except MachineError as error:
        return [error_html(str(error)), ("error",), gr.Timer(active=True)]
