"""The pages of the interface and the address of each.

Input: the workplace. Output: gradio Blocks. Every page is a module of its own, which shows what files
say and writes files; nothing is passed from one page to another but what stands in the address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Navbar

from .markup import PRODUCT, bar
from .pages.gradio_events import module
from .workplace import Workplace

_BAR = module("shared/live.js", 'module.start(element.querySelector(".bar"));')


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page and its path."""

    name: str
    path: str
    build: Callable[[Workplace], None]


# None is left: every page is a folder of its own.
PAGES: tuple[Page, ...] = ()


def build_site(work: Workplace) -> Any:
    """Return the gradio Blocks with all pages for the runs folder of `work`."""
    with gr.Blocks(title=PRODUCT, analytics_enabled=False) as site:
        Navbar(visible=False)  # "/" itself is home/
    for page in PAGES:
        with site.route(page.name, f"/{page.path}", show_in_navbar=False):
            _frame(page.name)
            page.build(work)
    return site


def _frame(name: str) -> None:
    """Put the bar on top of a page, instead of gradio's."""
    Navbar(visible=False)
    gr.HTML(bar(name), js_on_load=_BAR, apply_default_css=False)
