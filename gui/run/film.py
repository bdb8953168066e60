"""The film of a run's page: what its pictures are, each with how it was drawn, and the file that somebody saves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.event_kinds import Preview
from lora_trainer.reporting.film import FilmKind, Frame, film, frames, why_no_mp4
from lora_trainer.reporting.history import RunHistory, read_history

from ..media import run_url
from ..runs import run_folder
from ..server.translation import Words
from ..workplace import Workplace

# Records may name any file; a page leads to pictures of this run only.
_PICTURE = re.compile(r"(previews/step-\d{8,}\.jpg|samples/step-\d{8,}/\d{2,}\.png)")
_TYPES: Mapping[FilmKind, str] = {"gif": "image/gif", "mp4": "video/mp4"}


def film_of(folder: Path, history: RunHistory, _: Words) -> dict[str, Any]:
    """Return the pictures of the film, the first one that of the base where there is one."""
    drawn = {each.file: each for each in history.previews}
    shown = [
        {
            "step": frame.step,
            "name": _("step {#}", f"{frame.step:,}") if frame.step else _("base"),
            "src": src,
            "how": _how(drawn.get(frame.file), _),
        }
        for frame in frames(history)
        if (src := _address(folder, frame))
    ]
    prompts = (
        *(each.prompt for each in history.previews),
        *(each.prompt for each in history.samples),
    )
    prompt = next(iter(prompts), "")
    return {"frames": shown, "prompt": prompt, "no_mp4": _.message(why_no_mp4())}


def film_key(history: RunHistory) -> object:
    """Return what is another value when the film is another."""
    return (len(history.samples), history.sessions, [each.time_s for each in history.previews])


def _how(preview: Preview | None, _: Words) -> str:
    """Return how a picture was drawn, so that nobody takes a preview for a sample."""
    if preview is None:
        return _("A sample image, drawn in full.")
    if preview.drawn == "real":
        return _(
            "A quick preview: only {} denoising steps. Sample images are finer.",
            preview.denoising_steps,
        )
    return _(
        "A quick preview: only {} denoising steps, small, in approximate colours. Sample images are finer.",
        preview.denoising_steps,
    )


def _address(folder: Path, frame: Frame) -> str:
    if not _PICTURE.fullmatch(frame.file):
        return ""
    try:
        version = (folder / frame.file).stat().st_mtime_ns
    except OSError:
        return ""
    return f"{run_url(folder.name, *frame.file.split('/'))}?v={version:x}"


def route(work: Workplace) -> Route:
    """Return the route of the film as a file, /run/film?run=NAME&kind=gif."""

    async def serve(request: Request) -> Response:
        asked = request.query_params
        try:
            kind, made = await anyio.to_thread.run_sync(
                film_file, work, asked.get("run", ""), asked.get("kind", "")
            )
        except LoraTrainError as error:
            return PlainTextResponse(str(error), status_code=404)
        name = f"{asked['run']}.{kind}".encode("ascii", "replace").decode().replace('"', "_")
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "cache-control": "private, no-store",
        }
        return Response(made, media_type=_TYPES[kind], headers=headers)

    return Route("/run/film", serve)


def film_file(work: Workplace, run: str, kind: str) -> tuple[FilmKind, bytes]:
    """Return the kind and the film of a run; raises LoraTrainError."""
    folder = run_folder(work.runs, run)
    for known in get_args(FilmKind):
        if kind == known:
            return known, film(folder, read_history(folder), known)
    raise RequestError(f"{kind[:20]!r} is not a kind of film", fix="ask for gif or mp4")
