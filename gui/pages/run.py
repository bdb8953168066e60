"""The page Run."""

from __future__ import annotations

import gradio as gr

from ..workplace import Workplace


def build(work: Workplace) -> None:
    """Lay the page out."""
    gr.Markdown("# Run")
