"""The page of one run, /run?run=NAME: what it does, its curves, samples, log, settings and files.

Inputs: the name in the address; buttons. Outputs: the parts whose files have changed, once a second;
requests in the run's control folder. Nothing is kept but what this tab was sent last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.reporting.charts import Html, loss_curve
from lora_trainer.reporting.status import read_status

from .. import run_actions, state
from ..markup import error_html, note_html, tag
from ..posted import Posted
from ..run_parts import Part, chart_view, damaged_parts, parts, shown_best, stamp
from ..run_state import look
from ..server.asset_files import asset
from ..state import Followed
from ..workplace import Workplace
from . import share
from .gradio_events import PRIVATE, QUIET, TICK_S, answering, deletes, html, looked_at, module

_BUTTONS = {
    "sample": "Draw samples now",
    "save": "Save a LoRA file now",
    "stop": "Stop",
    "force": "Force stop",
    "end": "End the process",
    "resume": "Resume",
}
_CHART = module(
    "chart.js",
    'module.mount(element.querySelector(".chart-mount"), {'
    ' get: () => props.value, server, onchange: (draw) => watch("value", draw) });',
)
_SAMPLE_NOW = module("sample_now.js", "module.mount(element, server);")
_SECTIONS = (
    '<nav class="sections" aria-label="on this page"><a href="#samples">Newest samples</a>'
    '<a href="#every-step">Samples of every step</a><a href="#loss">Loss</a>'
    '<a href="#records">Log, settings, files</a></nav>'
)
_STRONG: dict[str, Any] = {"stop": "stop", "force": "stop", "end": "stop", "resume": "primary"}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one tab shows: the stamp of the run and the keys of its parts."""

    stamp: state.Stamp = ()
    keys: Mapping[str, object] = field(default_factory=dict)


def build(work: Workplace) -> None:
    """Lay the page out. A page asks once a second while its run goes, else when somebody looks at it."""
    page: Any = gr.context.Context.root_block
    followed = Followed()
    sent = gr.State(Sent())
    title = html(elem_classes="run-title")
    with gr.Column(elem_classes="run-page", visible=False) as body:
        widgets, said = _widgets(work, followed)
    share.build(work)
    deletes()
    back = looked_at()
    timer = gr.Timer(TICK_S)
    outputs = [title, body, *widgets.values(), sent, timer]

    def tick(before: Sent, request: gr.Request) -> Any:
        name = request.query_params.get("run", "")
        try:
            folder = state.run_folder(work.runs, name)
        except LoraTrainError:
            return _nothing(name, before, count=len(widgets))
        seen = look(folder, read_status(folder), now_s=time.time())
        now = (name, *stamp(seen))
        if now == before.stamp:
            return gr.skip()
        try:
            found = parts(seen, followed.read(folder))
        except (LoraTrainError, OSError) as error:
            found = damaged_parts(seen, str(error))
        updates = [_update(name, found, before) for name in widgets]
        keys = {part: found[part].key for part in found}
        goes = gr.Timer(active=seen.status.state == "running" or seen.goes_on_soon)
        shown = [_title(name), gr.Column(visible=True)]
        return [*shown, *updates, Sent(stamp=now, keys=keys), goes]

    gr.on([page.load, timer.tick, back.click], tick, sent, outputs, **QUIET)
    for pressed in _connect(work, widgets, said):
        pressed.then(tick, sent, outputs, **QUIET)


def _widgets(work: Workplace, followed: Followed) -> tuple[dict[str, Any], Any]:
    """Make the widgets of a run in the order of the page; return those that are updated."""
    widgets: dict[str, Any] = {"head": html(elem_classes="run-head")}
    with gr.Row(elem_classes="run-buttons"):
        for name, label in _BUTTONS.items():
            widgets[name] = gr.Button(
                label,
                elem_id="sample-now" if name == "sample" else None,
                visible=False,
                variant=_STRONG.get(name, "secondary"),
                size="md",
                scale=0,
                min_width=150,
            )
    widgets["where"] = gr.Textbox(
        label="Folder with the images",
        info="this run does not say where they are",
        visible=False,
        max_lines=1,
    )
    said = html(elem_classes="line")
    html(
        html_template='<div class="sample-now"></div>',
        js_on_load=_SAMPLE_NOW,
        server_functions=_sample_now(work, followed),
    )
    html(_SECTIONS)
    html('<h2 id="samples">Samples</h2>')
    widgets["samples"] = html(
        None,
        html_template='<div class="samples-mount"></div>',
        js_on_load=asset("samples.js"),
        server_functions=[_use_best(work)],
        elem_classes="run-samples",
    )
    html('<h2 id="loss">Loss</h2>')
    widgets["chart"] = html(
        {"drawn": "", "steps": 0},
        html_template='<div class="chart-mount"></div>',
        js_on_load=_CHART,
        server_functions=[_draw_chart(work, followed)],
        elem_classes="run-chart",
    )
    with gr.Tabs(elem_id="records"):
        with gr.Tab("Log"):
            widgets["log"] = html(apply_default_css=False)
        with gr.Tab("Settings"):
            widgets["settings"] = html(apply_default_css=False)
        with gr.Tab("Files and report"):
            widgets["files"] = html(apply_default_css=False, js_on_load=asset("run_files.js"))
    return widgets, said


def _connect(work: Workplace, widgets: Mapping[str, Any], said: Any) -> list[Any]:
    """Give the buttons their deeds; return the events after which the run is looked at again."""
    deeds: dict[str, Callable[[str, str], None]] = {
        "save": lambda run, _: run_actions.ask(work, run, "save"),
        "stop": lambda run, _: run_actions.ask(work, run, "stop"),
        "force": lambda run, _: run_actions.ask(work, run, "stop_now"),
        "end": lambda run, _: run_actions.end(work, run),
        "resume": lambda run, dataset: run_actions.resume(work, run, dataset=dataset),
    }
    pressed = [
        widgets[name].click(_told(deed), widgets["where"], said, **PRIVATE)
        for name, deed in deeds.items()
    ]

    def use_best(event: gr.EventData, request: gr.Request) -> str:
        return _best_html(work, request.query_params.get("run", ""), event.step)

    marked = widgets["samples"].click(lambda: "", None, said, **QUIET)
    return [*pressed, marked, widgets["files"].click(use_best, None, said, **PRIVATE)]


def _told(deed: Callable[[str, str], None]) -> Callable[..., Html]:
    """Return the handler of a button: what it does, or the refusal in a line."""

    def act(dataset: str, request: gr.Request) -> Html:
        try:
            deed(request.query_params.get("run", ""), dataset)
        except LoraTrainError as error:
            return error_html(str(error))
        return Html("")

    return act


def _draw_chart(work: Workplace, followed: Followed) -> Callable[[Any], dict[str, str]]:
    def draw_chart(asked: Any) -> dict[str, str]:
        values = asked if isinstance(asked, dict) else {}
        try:
            folder = state.run_folder(work.runs, str(values.get("run")))
            history = followed.read(folder).history
            view = chart_view(values, best=shown_best(folder, history))
            return {"drawn": loss_curve(history, view)}
        except (LoraTrainError, OSError) as error:
            return {"drawn": error_html(str(error))}

    return draw_chart


def _sample_now(work: Workplace, followed: Followed) -> list[Callable[[Any], dict[str, Any]]]:
    def first_prompt(posted: Posted) -> dict[str, Any]:
        history = followed.read(state.run_folder(work.runs, posted.text("run"))).history
        return {"prompt": next((image.prompt for image in history.samples), "")}

    def sample_now(posted: Posted) -> dict[str, Any]:
        run_actions.ask_for_samples(work, posted.text("run"), posted.text("prompt"))
        return {}

    return [answering(first_prompt), answering(sample_now)]


def _use_best(work: Workplace) -> Callable[[Any], dict[str, Any]]:
    def use_best(asked: Any) -> dict[str, Any]:
        values = asked if isinstance(asked, dict) else {}
        try:
            best = run_actions.use_as_best(work, str(values.get("run")), values.get("step"))
        except LoraTrainError as error:
            return {"said": str(error), "refused": True}
        return {"said": f"Step {best.step:,} is kept as {best.file}.", "refused": False}

    return use_best


def _best_html(work: Workplace, run: str, step: object) -> Html:
    answer = _use_best(work)({"run": run, "step": step})
    return error_html(answer["said"]) if answer["refused"] else note_html(answer["said"])


def _update(name: str, found: Mapping[str, Part], before: Sent) -> Any:
    """Return the update of a widget: nothing where its part is shown already."""
    part_name = "buttons" if name in _BUTTONS else name
    part = found[part_name]
    if part_name in before.keys and before.keys[part_name] == part.key:
        return gr.skip()
    if name in _BUTTONS:
        possible = part.draw()
        return gr.Button(visible=getattr(possible, name), variant=_STRONG.get(name, "secondary"))
    return gr.Textbox(visible=part.draw()) if name == "where" else part.draw()


def _nothing(name: str, before: Sent, *, count: int) -> Any:
    """Return the page for a name that is no run: one sentence and the way back."""
    now = ("no run", name)
    if before.stamp == now:
        return gr.skip()
    said = f"There is no run {name!r}." if name else "The address names no run."
    line = tag("p", said, " ", tag("a", "See all runs", href="/"), ".", class_="notice")
    hidden = gr.Column(visible=False)
    return [
        tag("div", tag("h1", "No such run"), line),
        hidden,
        *[gr.skip()] * count,
        Sent(stamp=now),
        gr.Timer(active=False),
    ]


def _title(name: str) -> Html:
    compared = "/compare?" + urlencode({"a": name})
    return tag(
        "div",
        tag("a", "All trainings", href="/"),
        tag("a", "Compare with another training", href=compared),
        tag("h1", name, translate="no"),
        class_="run-name",
    )
