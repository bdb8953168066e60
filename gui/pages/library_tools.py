"""The tab Tools: convert, cut, merge; each result is a new file of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError

from .. import jobs, lora_files, lora_tools
from ..lora_files import Header, LoraFile, find
from ..markup import error_html
from ..workplace import Workplace
from .gradio_events import html, in_turn
from .library_parts import LibraryTab

_NAME_HELP = "empty: a name is made; a file that exists is never replaced"
_OTHERS = 3
_NONE = [("none", "")]


def build(work: Workplace, ref: Any) -> LibraryTab:
    """Lay the tab out."""
    said = html(elem_classes="line")
    shown = html()
    seen = gr.State()
    timer = gr.Timer(1, active=False)
    outputs = [said, shown, seen, timer]
    with gr.Accordion("Convert: other key names, the same LoRA"):
        format_ = gr.Radio(
            label="For whom",
            choices=[
                ("A1111, Forge, ComfyUI (kohya's names)", "kohya"),
                ("diffusers, InvokeAI", "diffusers"),
                ("ComfyUI's own names", "comfyui"),
            ],
            value="kohya",
        )
        name = gr.Textbox(label="Name of the result", info=_NAME_HELP)
        convert = gr.Button("Convert", min_width=120, scale=0)
    with gr.Accordion("Make it smaller: cut its rank", open=False):
        with gr.Row():
            # gr.Number shows an empty field as 0, which means something here.
            rank = gr.Textbox(
                label="Rank at most", info="half the rank is half the file", min_width=160
            )
            energy = gr.Textbox(
                label="Keep this share, %",
                info="of what it changes, such as 95; with both, the lower rank counts",
                min_width=160,
            )
        cut_name = gr.Textbox(label="Name of the result", info=_NAME_HELP)
        cut = gr.Button("Make smaller", min_width=120, scale=0)
    with gr.Accordion("Merge: several LoRAs in one file", open=False):
        weight = gr.Number(label="Weight of this one", value=1.0, info="1 is its full strength")
        others: list[Any] = []
        for number in range(1, _OTHERS + 1):
            with gr.Row():
                others += [
                    gr.Dropdown(
                        label=f"LoRA {number + 1}",
                        choices=_NONE,
                        value="",
                        min_width=200,
                        scale=3,
                    ),
                    gr.Number(label="Weight", value=1.0, min_width=100),
                ]
        merged_rank = gr.Textbox(
            label="Cut the sum to this rank", info="empty: exact, its rank is the sum of the ranks"
        )
        merged_name = gr.Textbox(label="Name of the result", info=_NAME_HELP)
        merge = gr.Button("Merge", min_width=120, scale=0)

    def run(ref_: str, make: Callable[[LoraFile], jobs.Job]) -> list[Any]:
        try:
            make(find(work, ref_))
        except LoraTrainError as error:
            return [error_html(str(error)), *view(work, ref_, None)]
        return ["", *view(work, ref_, None)]

    def converted(ref_: str, format_: str, name: str) -> list[Any]:
        return run(ref_, lambda file: lora_tools.convert(work, file, format=format_, name=name))

    def resized(ref_: str, rank: str, share: str, name: str) -> list[Any]:
        return run(
            ref_,
            lambda file: lora_tools.resize(work, file, rank=rank, energy_percent=share, name=name),
        )

    def merged(ref_: str, weight: float | None, rank: str, name: str, *more: Any) -> Any:
        pairs = list(zip(more[::2], more[1::2], strict=True))
        return run(
            ref_,
            lambda file: lora_tools.merge(
                work, file, weight=weight, others=pairs, rank=rank, name=name
            ),
        )

    shows = in_turn("tools")
    convert.click(converted, [ref, format_, name], outputs, **shows)
    cut.click(resized, [ref, rank, energy, cut_name], outputs, **shows)
    inputs = [ref, weight, merged_rank, merged_name, *others]
    merge.click(merged, inputs, outputs, **shows)
    timer.tick(lambda name, last: view(work, name, last), [ref, seen], outputs[1:], **shows)

    def opened(file: LoraFile, header: Header) -> list[Any]:
        names = _others(work, file, header)
        lists = [gr.Dropdown(choices=names, value="") for _ in range(_OTHERS)]
        return [*lists, *view(work, file.ref, None)]

    return LibraryTab(outputs=[*others[::2], shown, seen, timer], opened=opened)


def _others(work: Workplace, file: LoraFile, header: Header) -> list[tuple[str, str]]:
    """Return what a file can be merged with: LoRAs for the same family of models."""
    found = [entry for entry in lora_files.entries(work) if entry.file.ref != file.ref]
    fitting = [entry.file.ref for entry in found if entry.header.family == header.family]
    return [*_NONE, *((ref.removesuffix(lora_files.SUFFIX), ref) for ref in fitting)]


def view(work: Workplace, name: str, seen: Any) -> list[Any]:
    """Return list, stamp and whether to go on asking; nothing new where nothing has changed."""
    try:
        found = lora_tools.of_file(work, find(work, name))
    except LoraTrainError:  # removed while its page is open; the next reload says so
        return [gr.skip()] * 3
    now = repr(lora_tools.stamp(found))
    if now == seen:
        return [gr.skip()] * 3
    works = any(job.state == "running" for job in found)
    return [lora_tools.shown(work, found), now, gr.Timer(active=works)]
