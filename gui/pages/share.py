"""The dialogs behind "Copy to ComfyUI or Forge" and "Publish", on each page that shows such a button.

A button has `data-share` (copy or publish) and `data-ref`, the LoRA as RUN/FILE; assets/share.js opens the
dialog for it and asks the functions here. Whoever is not signed in to the Hub is asked to, first.
"""

from __future__ import annotations

from typing import Any

from .. import bases, lora_files, sharing
from ..markup import plain
from ..posted import Posted
from ..workplace import Workplace
from .gradio_events import answering, html, module

_MOUNT = module("share.js", "module.mount(element, server);")


def hub_sign_in(posted: Posted) -> dict[str, Any]:
    """Keep the token that was typed into assets/sign_in.js, and return whose it is."""
    return {"name": bases.sign_in(posted.text("token", at_most=300))}


def build(work: Workplace) -> None:
    """Put the dialogs on a page."""

    def share_folder(_posted: Posted) -> dict[str, Any]:
        return {"folder": sharing.remembered_folder(work)}

    def share_copy(posted: Posted) -> dict[str, Any]:
        file = lora_files.find(work, posted.text("ref"))
        done = sharing.copy_to_program(work, file, posted.text("folder"))
        where = "is there already" if done.was_there else "is now there"
        return {"said": f"{done.files[0].name} {where}: {done.files[0].parent}"}

    def hub_signed_in(_posted: Posted) -> dict[str, Any]:
        return {"signed_in": bases.signed_in()}

    def share_publish(posted: Posted) -> dict[str, Any]:
        file = lora_files.find(work, posted.text("ref"))
        private = posted.choice("who", ("private", "public")) == "private"
        sharing.publish(work, file, repository=posted.text("name", at_most=200), private=private)
        return {"state": "running"}

    def share_published(posted: Posted) -> dict[str, Any]:
        jobs = sharing.published(work, lora_files.find(work, posted.text("ref")))
        if not jobs:
            return {"state": "none"}
        newest = jobs[0]
        last = next(iter(newest.log_tail(1)), "")
        only_reads = sharing.may_only_read(newest)
        return {
            "state": newest.state,
            "said": plain(newest.error() or last),
            "only_reads": only_reads,
        }

    html(
        html_template='<div class="share"></div>',
        js_on_load=_MOUNT,
        server_functions=[
            answering(act)
            for act in (
                share_folder,
                share_copy,
                hub_signed_in,
                hub_sign_in,
                share_publish,
                share_published,
            )
        ],
    )
