"""What the pages share: the options of their handlers, none of which is an address for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError

from ..markup import plain
from ..posted import Posted

PRIVATE: Mapping[str, Any] = {"api_visibility": "private"}
# For handlers that answer at once: no spinner, and none waits for another one.
QUIET: Mapping[str, Any] = {**PRIVATE, "show_progress": "hidden", "concurrency_limit": None}
# Markup of our own, which assets/site.css styles alone.
html = partial(gr.HTML, apply_default_css=False)
# The script of an element whose value {"to": ADDRESS} leads to another page.
GO = 'watch("value", () => { if (props.value.to) location.assign(props.value.to); });'
# How often a page asks while what it shows may change; with nothing under way its timer stands still.
TICK_S = 1.0
_LOOKED_AT = """
const back = () => { if (element.isConnected && !document.hidden) trigger("click"); };
document.addEventListener("visibilitychange", back);
window.addEventListener("focus", back);
"""


def in_turn(name: str) -> Mapping[str, Any]:
    """Return the options of quiet handlers that show the same: one at a time, in the order they were asked.

    A look that began before a button was pressed, and ended after the button's own, would show the old
    state again, and stop a timer that the button had started.
    """
    return {**QUIET, "concurrency_id": name, "concurrency_limit": 1}


def looked_at() -> Any:
    """Return an element whose click comes when somebody comes back to the page."""
    return html(js_on_load=_LOOKED_AT)


def module(name: str, body: str) -> str:
    """Return the script of an element that calls `body` with `module`, the script /ui/NAME.

    A page that is left while its scripts arrive has nothing to call; that is no error.
    """
    return (
        f'import("/ui/{name}").then((module) => {{ {body} }}, (problem) => console.warn(problem));'
    )


def deletes() -> Any:
    """Give a page the deeds of the buttons that delete, see trash/script.js."""
    return html(
        html_template='<p class="trash"></p>',
        js_on_load=module("trash/script.js", "module.mount(element);"),
    )


def answering(
    act: Callable[[Posted], dict[str, Any]], name: str = ""
) -> Callable[[Any], dict[str, Any]]:
    """Return a function for a script: it takes one object, and a refusal is an answer too."""

    def answer(values: Any) -> dict[str, Any]:
        try:
            return act(Posted.of(values))
        except LoraTrainError as error:
            return {"error": plain(str(error))}

    answer.__name__ = name or act.__name__
    return answer
