"""What pages of Gradio put on themselves of share/: its dialogs, and the sign-in to the Hub."""

from __future__ import annotations

from typing import Any

from .. import bases
from ..posted import Posted
from .gradio_events import html, module

_MOUNT = module("share/script.js", "module.mount(element);")


def hub_sign_in(posted: Posted) -> dict[str, Any]:
    """Keep the token that was typed into share/sign_in.js, and return whose it is."""
    return {"name": bases.sign_in(posted.text("token", at_most=300))}


def build() -> None:
    """Put the dialogs behind "Copy to ComfyUI or Forge" and "Publish" on a page."""
    html(html_template='<div class="share"></div>', js_on_load=_MOUNT)
