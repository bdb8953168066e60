"""The tab Describe: what the header tells people, and the preview beside the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.tools.describe import describe, description_of

from .. import library, sharing
from ..lora_files import Header, LoraFile, find, read_header, take_note
from ..lora_files import rename as rename_lora
from ..markup import error_html, note_html
from ..server.asset_files import asset
from ..workplace import Workplace
from .gradio_events import GO, QUIET, html
from .library_parts import LibraryTab


def build(work: Workplace, ref: Any, head: Any) -> LibraryTab:
    """Lay the tab out; `head` shows what is saved here."""
    with gr.Row(elem_classes="lora-named"):
        file_name = gr.Textbox(label="Name of the file", max_lines=1, scale=3, min_width=200)
        rename = gr.Button("Rename", min_width=120, scale=0)
    note = gr.Textbox(label="Notes", info="for you only, kept on this machine", lines=2)
    named = html(elem_classes="line")
    go = html(value={"to": ""}, html_template="<span></span>", js_on_load=GO)
    title = gr.Textbox(label="Title")
    trigger = gr.Textbox(
        label="Trigger words", info="what a prompt must contain for the LoRA to show"
    )
    description = gr.Textbox(label="Description", lines=3)
    with gr.Row():
        tags = gr.Textbox(label="Tags", info="with commas between", min_width=200)
        author = gr.Textbox(label="Author", info="as you want to be named", min_width=200)
        license_ = gr.Textbox(
            label="License", info="what others may do with it, such as CC-BY-4.0", min_width=200
        )
    save = gr.Button("Save into the file", variant="primary", min_width=160, scale=0)
    said = html(elem_classes="line")
    gr.Markdown("## Preview\nThe picture that other programs show beside the file.")
    choices = html(js_on_load=asset("choose.js"))
    upload = gr.UploadButton("Use another picture\u2026", file_types=["image"], scale=0)
    chosen = html(elem_classes="line")
    fields = [title, description, author, license_, trigger, tags]

    names = ("title", "description", "author", "license", "trigger", "tags")

    def saved(name: str, *texts: str) -> list[Any]:
        try:
            file = find(work, name)
            new = dict(zip(names, texts, strict=True))
            changed = describe(file.path, new, output=file.path, force=True)
            file = find(work, name)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip()]
        words = ", ".join(key.partition(".")[2].replace("_", " ") for key in changed)
        note = f"Saved: {words}." if words else "Nothing was changed."
        return [note_html(note), library.head(file, read_header(file))]

    def take(name: str, picture: Path | str) -> list[Any]:
        try:
            file = find(work, name)
            image = (
                sharing.chosen_preview(work, file, picture) if isinstance(picture, str) else picture
            )
            written = sharing.write_preview(file, image)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip(), gr.skip()]
        return [
            note_html(f"The preview is now {written.name}, beside the LoRA."),
            sharing.preview_choices_html(work, file),
            library.head(file, read_header(file)),
        ]

    def picked(name: str, event: gr.EventData) -> list[Any]:
        return take(name, str(event._data))

    save.click(saved, [ref, *fields], [said, head], **QUIET)
    outputs = [chosen, choices, head]
    choices.click(picked, ref, outputs, **QUIET)
    upload.upload(lambda name, file: take(name, Path(file)), [ref, upload], outputs, **QUIET)

    def renamed(name: str, typed: str) -> list[Any]:
        try:
            file = rename_lora(work, name, typed)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip()]
        return ["", {"to": library.page_url(file)}]

    def noted(name: str, text: str) -> list[Any]:
        try:
            file = take_note(work, name, text)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip()]
        return [note_html("Noted."), library.head(file, read_header(file))]

    gr.on([rename.click, file_name.submit], renamed, [ref, file_name], [named, go], **QUIET)
    # Left again before it is answered, it counts too.
    note.blur(noted, [ref, note], [named, head], trigger_mode="always_last", **QUIET)

    def opened(file: LoraFile, header: Header) -> list[Any]:
        texts = description_of(header.metadata)
        values = [texts[name] for name in names]
        return [*values, sharing.preview_choices_html(work, file), file.path.stem, file.note]

    return LibraryTab(outputs=[*fields, choices, file_name, note], opened=opened)
