"""What the dialogs ask that copy a LoRA to ComfyUI or Forge, show it in ComfyUI, zip it for Civitai and publish it.

A button has `data-share` (copy, comfyui, civitai or publish) and `data-ref`, the LoRA as RUN/FILE; script.js opens its
dialog. Whoever is not signed in to the Hub is asked to, first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints
from starlette.routing import Route

from lora_trainer.tools.comfyui.server import ADDRESS

from .. import bases, lora_files, sharing
from ..markup import capital, plain
from ..media import EXPORTS, run_url
from ..server.pages import Body, Nothing, Text, answer
from ..server.translation import Words
from ..shared.of_lora import OfLora
from ..workplace import Workplace
from . import comfyui


class Copy(OfLora):
    """Copy a LoRA into the folder of another program, or to where that program keeps its LoRAs."""

    folder: Text


class InComfyUI(OfLora):
    """Draw with a LoRA in the ComfyUI of that folder and address; an empty prompt: that of its workflow."""

    folder: Text
    address: Text
    prompt: Annotated[str, StringConstraints(max_length=10_000)]


class SignIn(Body):
    """Keep a token of the Hub."""

    token: Annotated[str, StringConstraints(max_length=300)]


class ForCivitai(OfLora):
    """Make the zip that Civitai is given, which names the strength."""

    weight: Annotated[float, Field(ge=0, le=2)]


class Publish(OfLora):
    """Publish a LoRA as `name`."""

    name: Annotated[str, StringConstraints(max_length=200)]
    who: Literal["private", "public"]


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the dialogs."""

    def folder(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        program = sharing.remembered(work)
        return {"folder": program.folder, "address": program.address or ADDRESS}

    def copy(asked: Copy, _: Words) -> Mapping[str, Any]:
        done = sharing.copy_to_program(work, lora_files.find(work, asked.file), asked.folder)
        file = done.files[0]
        said = "{} is there already: {}" if done.was_there else "{} is now there: {}"
        return {"said": _(said, file.name, file.parent)}

    def see_in_comfyui(asked: InComfyUI, _: Words) -> Mapping[str, Any]:
        file = lora_files.find(work, asked.file)
        wish = asked.model_dump(exclude={"file"})
        comfyui.start(work, file, **wish)
        return {"state": "running"}

    def seen_in_comfyui(asked: OfLora, _: Words) -> Mapping[str, Any]:
        return comfyui.shown(work, lora_files.find(work, asked.file), _)

    def for_civitai(asked: ForCivitai, _: Words) -> Mapping[str, Any]:
        file = lora_files.find(work, asked.file)
        done, found = sharing.export_checked(
            file, file.path.parent / EXPORTS, weight=asked.weight, zipped=True
        )
        name = done.files[0].name
        missing = [
            plain(f"{capital(_.message(each.what))}. {capital(_.message(each.advice))}.")
            for each in found
        ]
        return {"name": name, "url": run_url(file.run, EXPORTS, name), "missing": missing}

    def signed_in(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        return {"signed_in": bases.signed_in()}

    def sign_in(asked: SignIn, _: Words) -> Mapping[str, Any]:
        return {"name": bases.sign_in(asked.token)}

    def publish(asked: Publish, _: Words) -> Mapping[str, Any]:
        file, private = lora_files.find(work, asked.file), asked.who == "private"
        sharing.publish(work, file, repository=asked.name, private=private)
        return {"state": "running"}

    def published(asked: OfLora, _: Words) -> Mapping[str, Any]:
        jobs = sharing.published(work, lora_files.find(work, asked.file))
        if not jobs:
            return {"state": "none"}
        newest = jobs[0]
        last = next(iter(newest.log_tail(1)), "")
        return {
            "state": newest.state,
            "said": _.message(plain(newest.error() or last)),
            "only_reads": sharing.may_only_read(newest),
        }

    return [
        answer("/share/folder", Nothing, folder),
        answer("/share/copy", Copy, copy),
        answer("/share/comfyui", InComfyUI, see_in_comfyui),
        answer("/share/seen", OfLora, seen_in_comfyui),
        answer("/share/civitai", ForCivitai, for_civitai),
        answer("/share/signed-in", Nothing, signed_in),
        answer("/share/sign-in", SignIn, sign_in),
        answer("/share/publish", Publish, publish),
        answer("/share/published", OfLora, published),
    ]
