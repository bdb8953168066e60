"""The page /_kit, for whoever works on the pages: every component in every state.

It is there with LORA_TRAIN_GUI_KIT=1 in the environment only; a look at it, light and dark, wide and
narrow, shows what a change of assets/site.css does to all pages.
"""

from __future__ import annotations

import gradio as gr

from lora_trainer.reporting.charts import Html, table, tag

from ..markup import (
    STATE_ICONS,
    button,
    delete_button,
    drop_zone,
    error_html,
    icon,
    link_button,
    note_html,
    progress,
    share_buttons,
    state_line,
)
from ..run_state import Stage
from ..run_view import stages_html
from ..workplace import Workplace
from .gradio_events import html

_STAGES = (
    Stage(name="A stage that is done", state="done"),
    Stage(name="One that goes on", state="now", done=14, total=23),
    Stage(name="One that comes later", state="later"),
)
_KINDS = ("", "primary", "danger", "bare")


def build(_work: Workplace) -> None:
    """Lay the page out."""
    html(components())
    with gr.Row():
        gr.Button("Gradio, primary", variant="primary", scale=0)
        gr.Button("Gradio, secondary", scale=0)
        gr.Button("Gradio, stop", variant="stop", scale=0)
        gr.Button("Gradio, small", size="sm", scale=0)
        gr.Button("Gradio, disabled", interactive=False, scale=0)
    with gr.Row():
        gr.Textbox(label="Text", placeholder="a placeholder", info="What it is for.")
        gr.Dropdown(label="Choice", choices=["one", "two"], value="one")
        gr.Slider(label="Number", minimum=0, maximum=1, value=0.4)
    gr.Radio(label="One of these", choices=["A person", "A style", "An object"], value="A style")
    gr.Checkbox(label="A switch", value=True)


def components() -> Html:
    """Return our own components, each in every state."""
    return tag(
        "div",
        tag("h1", "Heading of a page"),
        tag("h2", "Heading of a section"),
        tag("h3", "Heading of a card"),
        tag(
            "p",
            "Running text with ",
            tag("a", "a link", href="#"),
            " and ",
            tag("code", "code"),
            ".",
        ),
        tag("p", "What matters less.", class_="quiet"),
        tag("h2", "Buttons"),
        *(_buttons(size) for size in ("", "big")),
        tag(
            "p",
            *share_buttons("", for_others=True),
            delete_button("", "", name="it", then=""),
            class_="actions",
        ),
        tag("h2", "States"),
        *(state_line(state, state) for state in STATE_ICONS),
        *(tag("p", progress(0.45, label=state, state=state)) for state in STATE_ICONS),
        stages_html(_STAGES),
        note_html("A remark."),
        tag("p", "A warning.", class_="notice warning"),
        tag("p", tag("mark", "best", class_="badge")),
        error_html("A refusal says what was found and what to do."),
        drop_zone(),
        tag("h2", "Fields"),
        tag(
            "p",
            tag("input", type="text", value="text", aria_label="text"),
            tag("input", type="text", placeholder="a placeholder", aria_label="empty"),
            tag("input", type="text", value="wrong", aria_invalid="true", aria_label="wrong"),
            tag("input", type="checkbox", checked="", aria_label="switch"),
            tag("select", tag("option", "a choice"), aria_label="choice"),
            class_="actions",
        ),
        table(("name", "value"), [("rank", "16"), ("steps", "300")]),
        tag("h2", "Icons"),
        tag("p", *(icon(name) for name in ICONS), class_="actions"),
    )


ICONS = ("house", "sparkles", "images", "list-ordered", "layers", "settings", "stethoscope", "bell")


def _buttons(size: str) -> Html:
    made = [
        button(kind or "plain", icon_name="play", kind=f"{kind} {size}".strip()) for kind in _KINDS
    ]
    off = button("disabled", kind=f"primary {size}".strip(), disabled=True)
    pressed = button("pressed", kind=size, attributes={"aria-pressed": "true"})
    link = link_button("a link", "#", icon_name="arrow-right", kind=f"primary {size}".strip())
    return tag("p", *made, off, pressed, link, class_="actions")
