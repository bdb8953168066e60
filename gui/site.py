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

from .pages import datasets, doctor, expert, home, library, queue, run, train
from .workplace import Workplace


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page; `listed` says whether the navigation leads to it."""

    name: str
    path: str
    build: Callable[[Workplace], None]
    listed: bool = True


HOME = "Runs"
PAGES = (
    Page(name="Train", path="train", build=train.build),
    Page(name="Run", path="run", build=run.build, listed=False),
    Page(name="Datasets", path="datasets", build=datasets.build),
    Page(name="Queue", path="queue", build=queue.build),
    Page(name="LoRAs", path="library", build=library.build),
    Page(name="Settings", path="settings", build=expert.build),
    Page(name="Doctor", path="doctor", build=doctor.build),
)


def build_site(work: Workplace) -> Any:
    """Return the gradio Blocks with all pages for the runs folder of `work`."""
    with gr.Blocks(title="lora-train", analytics_enabled=False) as site:
        Navbar(main_page_name=HOME)
        home.build(work)
    for page in PAGES:
        with site.route(page.name, f"/{page.path}", show_in_navbar=page.listed):
            Navbar(main_page_name=HOME)
            page.build(work)
    return site
