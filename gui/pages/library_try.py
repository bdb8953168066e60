"""The tab Try: prompts at several strengths, drawn by a process of its own."""

from __future__ import annotations

from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError

from .. import jobs, tries
from ..lora_files import Header, LoraFile, find
from ..markup import error_html, note_html
from ..workplace import Workplace
from .gradio_events import QUIET, html, in_turn
from .library_parts import LibraryTab

_BASE_HELP = (
    "a folder, a .safetensors file or a name on Hugging Face; empty: the one it was trained on"
)


def build(work: Workplace, ref: Any) -> LibraryTab:
    """Lay the tab out."""
    prompts = gr.Textbox(
        label="Prompts", info="one on each line; each is drawn at every strength", lines=3
    )
    with gr.Row():
        strengths = gr.Textbox(
            label="Strengths",
            info="1 is the strength it was trained at",
            value=" ".join(f"{value:g}" for value in tries.STRENGTHS),
            min_width=160,
        )
        seed = gr.Number(
            label="Seed",
            info="the same seed and prompt give the same picture",
            value=tries.SEED,
            precision=0,
            min_width=160,
        )
        base = gr.Textbox(label="Another base model", info=_BASE_HELP, min_width=200)
    with gr.Row():
        draw = gr.Button("Draw", variant="primary", min_width=120, scale=0)
        stop = gr.Button("Stop drawing", visible=False, min_width=170, scale=0)
    said = html(elem_classes="line")
    shown = html()
    seen = gr.State()
    timer = gr.Timer(1, active=False)

    def started(name: str, lines: str, typed: str, number: float | None, model: str) -> list[Any]:
        try:
            wish = tries.wish(prompts=lines, strengths=typed, seed=number, base=model)
            tries.start(work, find(work, name), wish)
        except LoraTrainError as error:
            return [error_html(str(error)), *view(work, name, None)]
        return ["", *view(work, name, None)]

    def stopped(name: str) -> str:
        try:
            for job in tries.of_file(work, find(work, name)):
                jobs.stop(job)
        except LoraTrainError as error:
            return error_html(str(error))
        return ""

    outputs = [shown, seen, stop, timer]
    shows = in_turn("tries")
    draw.click(started, [ref, prompts, strengths, seed, base], [said, *outputs], **shows)
    stop.click(stopped, ref, said, **QUIET)
    timer.tick(lambda name, last: view(work, name, last), [ref, seen], outputs, **shows)

    def opened(file: LoraFile, header: Header) -> list[Any]:
        first = tries.example_prompt(file, header)
        warned = note_html(tries.warning(work))
        return [first, warned, *view(work, file.ref, None)]

    return LibraryTab(outputs=[prompts, said, *outputs], opened=opened)


def view(work: Workplace, name: str, seen: Any) -> list[Any]:
    """Return grid, stamp, the stop button and whether to go on asking; nothing new where nothing changed."""
    try:
        found = tries.of_file(work, find(work, name))
    except LoraTrainError:  # removed while its page is open; the next reload says so
        return [gr.skip()] * 4
    now = repr(tries.stamp(work, found))
    if now == seen:
        return [gr.skip()] * 4
    draws = any(job.state == "running" for job in found)
    return [tries.shown(work, found), now, gr.Button(visible=draws), gr.Timer(active=draws)]
