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
from lora_trainer.common.event_kinds import Finished, Preview
from lora_trainer.reporting.film import FilmKind, Frame, film, frames, why_no_mp4
from lora_trainer.reporting.history import RunHistory, read_history

from ..media import run_url
from ..prompt_text import spoken_prompt
from ..runs import run_folder
from ..server.translation import Words
from ..workplace import Workplace

# Records may name any file; a page leads to pictures of this run only.
_PICTURE = re.compile(r"(previews/step-\d{8,}\.jpg|samples/step-\d{8,}/\d{2,}\.png)")
_TYPES: Mapping[FilmKind, str] = {"gif": "image/gif", "mp4": "video/mp4"}


def film_of(folder: Path, history: RunHistory, _: Words, *, best_step: int = 0) -> dict[str, Any]:
    """Return the pictures of the film, the first one that of the base where there is one.

    The film of a run that has finished opens at the finished sample of the best step, beside that of the base.
    """
    quick = {each.file: each for each in history.previews}
    shown: list[dict[str, Any]] = [
        {
            "step": frame.step,
            "name": _("step {#}", f"{frame.step:,}") if frame.step else _("base"),
            "src": src,
            "how": _how(quick.get(frame.file), _),
        }
        for frame in _frames(history, best_step)
        if (src := _address(folder, frame))
    ]
    opens = _opens_at(history, best_step)
    name = "" if opens is None else f"/{opens.file}?"
    opens_at = next((at for at, frame in enumerate(shown) if name and name in frame["src"]), -1)
    return {
        "frames": shown,
        "prompt": spoken_prompt(_prompt(history), _),
        "no_mp4": _.message(why_no_mp4()),
        "opens_at": opens_at,
        "goes": history.end is None,
    }


def film_key(history: RunHistory, best_step: int) -> object:
    """Return what is another value when the film is another."""
    drawn = (len(history.samples), history.sessions, [each.time_s for each in history.previews])
    return (*drawn, _opens_at(history, best_step), history.end is None)


def _prompt(history: RunHistory) -> str:
    prompts = (
        *(each.prompt for each in history.previews),
        *(each.prompt for each in history.samples),
    )
    return next(iter(prompts), "")


def _samples(history: RunHistory) -> dict[int, Frame]:
    """Return the finished samples of the film's prompt by step."""
    prompt = _prompt(history)
    seed = next((each.seed for each in history.samples if each.prompt == prompt), "")
    return {
        each.step: Frame(step=each.step, file=each.file)
        for each in history.samples
        if (each.prompt, each.seed) == (prompt, seed)
    }


def _opens_at(history: RunHistory, best_step: int) -> Frame | None:
    """Return the finished sample nearest to the best step of a run that has finished, to its end without one."""
    drawn = _samples(history)
    steps = [step for step in drawn if step]
    if not isinstance(history.end, Finished) or not steps:
        return None
    wanted = best_step or history.end.step
    return drawn[min(steps, key=lambda step: abs(step - wanted))]


def _frames(history: RunHistory, best_step: int) -> list[Frame]:
    """Return the pictures of the film; quick ones of the base and the best step are replaced by samples."""
    found, opens = frames(history), _opens_at(history, best_step)
    if opens is None:
        # On a busy machine previews are rare: a sample that is newer is the newest picture.
        newest = max((each.step for each in found), default=-1)
        return [
            *found,
            *(each for step, each in sorted(_samples(history).items()) if step > newest),
        ]
    base = _samples(history).get(0)
    finished = [opens] if base is None else [base, opens]
    steps = {each.step for each in finished}
    return sorted(
        [*finished, *(each for each in found if each.step not in steps)], key=lambda each: each.step
    )


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
