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
