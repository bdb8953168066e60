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


def module(name: str, body: str) -> str:
    """Return the script of an element that calls `body` with `module`, the script /ui/NAME.

    A page that is left while its scripts arrive has nothing to call; that is no error.
    """
    return (
        f'import("/ui/{name}").then((module) => {{ {body} }}, (problem) => console.warn(problem));'
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
