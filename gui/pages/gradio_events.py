"""What the pages share: the options of their handlers, none of which is an address for programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gradio as gr

PRIVATE: Mapping[str, Any] = {"api_visibility": "private"}
QUIET: Mapping[str, Any] = {**PRIVATE, "show_progress": "hidden", "concurrency_limit": None}
"""For handlers that answer at once: no spinner, and none waits for another one."""
html = partial(gr.HTML, apply_default_css=False)
"""Markup of our own, which assets/site.css styles alone."""


def module(name: str, body: str) -> str:
    """Return the script of an element that calls `body` with `module`, the script /ui/NAME.

    A page that is left while its scripts arrive has nothing to call; that is no error.
    """
    return (
        f'import("/ui/{name}").then((module) => {{ {body} }}, (problem) => console.warn(problem));'
    )
