"""The page LoRAs, and what its scripts ask: a search, and what is done with one file, RUN/FILE.

/library              all LoRAs, and the place for files of one's own; with ?search=WORDS&base=MODEL those that fit
/library?file=REF     the page of one; with &beside=REF another one is chosen to draw the same
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import StringConstraints
from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.tools.describe import description_of

from .. import brought, drawing, jobs, lora_files, sharing, uploads
from ..lora_files import Header, LoraFile, find
from ..markup import capital, plain
from ..media import EXPORTS, run_url
from ..prompt_text import spoken_prompt
from ..server.pages import Body, Text, answer, attempted, page
from ..server.templates import render
from ..server.translation import Words
from ..shared.of_lora import OfLora
from ..trash import store
from ..upload_names import safe_name
from ..workplace import Workplace
from . import describe, tools, try_prompts, view
from .preview import TrainingSamples, preview_of, samples_of

LongText = Annotated[str, StringConstraints(max_length=100_000)]
Answer = Mapping[str, Any]
# Of the page of a file: how many others it can be merged with at once.
OTHERS = 3


class Search(Body):
    """Words, the base model that the LoRAs are for, an empty one for all, and one of view.ORDERS."""

    text: Text
    base: Text
    order: Text = ""


class Bring(Body):
    """A LoRA file that was sent as the one file of a batch, and what its owner calls it."""

    batch: Text
    name: Text


class NewName(OfLora):
    """Another name for a file."""

    name: Text


class Note(OfLora):
    """A note on a file, for its owner only."""

    text: LongText


class Texts(OfLora):
    """What the header of a file tells people."""

    title: LongText
    description: LongText
    author: LongText
    license: LongText
    trigger: LongText
    tags: LongText


class Preview(OfLora):
    """One of the choices for a preview, or the picture that was sent as the one file of a batch."""

    choice: Text | None = None
    batch: Text | None = None
    name: Text = ""


class Export(OfLora):
    """Where a file goes with its preview and card, and what the card says."""

    weight: float
    notes: LongText
    folder: Text


class Draw(Body):
    """What is to be drawn; without a seed it is the usual one. `others` draw the same."""

    prompts: LongText
    strengths: Text
    seed: float | None
    base: Text
    others: list[Text]


class Mark(Body):
    """A picture of a try."""

    job: Text
    row: int
    file: int
    strength: float


class Tries(OfLora):
    """How the tries of a file are, once one is begun, all are stopped, a picture is marked or the base is given back.

    `stamp` is of those that the page shows.
    """

    stamp: Text
    draw: Draw | None = None
    stop: bool = False
    mark: Mark | None = None
    give_back: bool = False


class Convert(Body):
    """Other key names for a file."""

    format: Text
    name: Text


class Cut(Body):
    """A lower rank for a file."""

    rank: Text
    energy_percent: Text
    name: Text


class Part(Body):
    """Another LoRA to merge with."""

    file: Text
    weight: float | None


class Merge(Body):
    """Several LoRAs in one file."""

    weight: float | None
    others: list[Part]
    rank: Text
    name: Text


class Jobs(OfLora):
    """How the jobs of a file are, once one is begun; `stamp` is of those that the page shows."""

    stamp: Text
    convert: Convert | None = None
    cut: Cut | None = None
    merge: Merge | None = None


Asked = TypeVar("Asked", bound=Body)


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its scripts."""

    def ask(
        name: str, body: type[Asked], act: Callable[[Workplace, Asked, Words], Answer]
    ) -> Route:
        return answer(f"{view.PAGE}/{name}", body, partial(act, work))

    return [
        page(view.PAGE, "library/page.html", title="LoRAs", look=partial(shown, work)),
        ask("search", Search, search),
        ask("bring", Bring, bring),
        ask("tries", Tries, tries),
        ask("rename", NewName, rename),
        ask("note", Note, note),
        ask("texts", Texts, texts),
        ask("preview", Preview, preview),
        ask("jobs", Jobs, made),
        ask("check", OfLora, check),
        ask("export", Export, export),
        ask("inside", OfLora, inside),
    ]


def shown(work: Workplace, request: Request, _: Words) -> Answer:
    """Return what the page shows: all LoRAs, one of them, or that there is none of that name."""
    asked = request.query_params.get("file")
    if not asked:
        text, base, order = (
            request.query_params.get(name, "") for name in ("search", "base", "order")
        )
        return {"part": "shelf", **view.shelf(work, text, base, order, _)}
    try:
        file = find(work, asked)
    except LoraTrainError as error:
        said = capital(_.message(plain(str(error))))
        return {"part": "missing", "said": said, "thrown": store.holding(work, asked)}
    header = lora_files.read_header(file)
    # A file that cannot be read has no use for any of the tabs.
    more = {} if header.problem else _tabs(work, file, header, _)
    if (beside := request.query_params.get("beside")) and more:
        more = {**more, "beside": [*more["beside"], beside]}
    return {"part": "file", "lora": view.head(file, header, _), **more}


def _tabs(work: Workplace, file: LoraFile, header: Header, _: Words) -> Answer:
    """Return what the tabs of the page of a file begin with."""
    others = [entry.file for entry in _mergeable(work, file, header)]
    drawn, made = try_prompts.of_file(work, file), tools.of_file(work, file)
    saves, more = try_prompts.others(work, file, header)
    return {
        "saves": [(save.ref, view.step(save, _)) for save in saves],
        "more": [(each.ref, each.label) for each in more],
        **try_prompts.form(file, header, drawn),
        "warning": _(try_prompts.warning(work)),
        "tries": _tries_now(work, file, _),
        "jobs": _jobs_now(work, made, _),
        "drawn_by_training": _drawn_by_training(file, _),
        "stem": file.path.stem,
        "note": file.note,
        "texts": description_of(header.metadata),
        "choices": describe.shown_choices(work, file),
        "others": [(each.ref, each.label) for each in others],
        "others_at_once": OTHERS,
        "formats": tools.formats(header, _),
        "rank": header.rank,
        "needs_base": file.is_brought and not header.finds_base,
    }


def _drawn_by_training(file: LoraFile, _: Words) -> TrainingSamples | None:
    found = samples_of(file)
    if found is None:
        return None
    said = ({**each, "prompt": spoken_prompt(each["prompt"], _)} for each in found.images)
    return replace(found, images=tuple(said))


def _mergeable(work: Workplace, file: LoraFile, header: Header) -> list[lora_files.Entry]:
    """Return what a file can be merged with: LoRAs for the same family of models."""
    found = [entry for entry in lora_files.entries(work) if entry.file.ref != file.ref]
    return [entry for entry in found if entry.header.family == header.family]


def search(work: Workplace, asked: Search, _: Words) -> Answer:
    """Return the cards of the LoRAs that fit."""
    found = lora_files.entries(work)
    fitting = view.ordered(lora_files.matching(found, asked.text, asked.base), asked.order)
    return {"html": view.grid(fitting, of=len(found), said=_)}


def bring(work: Workplace, asked: Bring, _: Words) -> Answer:
    """Keep a LoRA file that was sent; return the address of its page, and what to say there."""
    folder = uploads.batch_folder(work, asked.batch)
    try:
        taken = brought.take_in(work, folder / "0", asked.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    file = find(work, f"{brought.FOLDER}/{taken.path.name}")
    said = "{} is here already." if taken.was_there else "{} is added."
    return {"to": view.page_url(file), "done": _(said, file.label)}


def tries(work: Workplace, asked: Tries, _: Words) -> Answer:
    """Begin to draw, or stop; return how the tries of the file are where they have changed."""
    file = find(work, asked.file)

    def act() -> Answer:
        if asked.draw is not None:
            wish = try_prompts.wish(
                prompts=asked.draw.prompts,
                strengths=asked.draw.strengths,
                seed=asked.draw.seed,
                base=asked.draw.base,
                others=asked.draw.others,
            )
            try_prompts.start(work, file, wish)
        if asked.stop:
            for job in try_prompts.of_file(work, file):
                if job.state == "running":
                    drawing.stop(job)
        if (mark := asked.mark) is not None:
            place = try_prompts.Place(row=mark.row, file=mark.file, strength=mark.strength)
            try_prompts.mark(work, file, mark.job, place)
        if asked.give_back:
            drawing.give_back()
        return {}

    done = attempted(act, _, folder=work.own)
    now = _tries_now(work, find(work, asked.file), _)
    return {**done, **_changed(now, asked.stamp)}


def _tries_now(work: Workplace, file: LoraFile, _: Words) -> Answer:
    """Return the tries of a file, and the top of its page: which step is the best changes while it trains."""
    found, head = try_prompts.of_file(work, file), view.head_html(file, _)
    return {
        "stamp": _stamp((try_prompts.stamp(work, found), head)),
        "head": head,
        "goes": any(job.state == "running" for job in found),
        "html": try_prompts.shown(work, found, _),
    }


def made(work: Workplace, asked: Jobs, _: Words) -> Answer:
    """Begin to convert, cut or merge; return how the jobs of the file are where they have changed."""
    file = find(work, asked.file)
    done = attempted(lambda: _make(work, file, asked), _, folder=work.own)
    now = _jobs_now(work, tools.of_file(work, file), _)
    return {**done, **_changed(now, asked.stamp)}


def _make(work: Workplace, file: LoraFile, asked: Jobs) -> Answer:
    if asked.convert is not None:
        tools.convert(work, file, format=asked.convert.format, name=asked.convert.name)
    if (cut := asked.cut) is not None:
        tools.resize(work, file, rank=cut.rank, energy_percent=cut.energy_percent, name=cut.name)
    if (merge := asked.merge) is not None:
        others = [(part.file, part.weight) for part in merge.others]
        tools.merge(
            work, file, weight=merge.weight, others=others, rank=merge.rank, name=merge.name
        )
    return {}


def _jobs_now(work: Workplace, found: list[jobs.Job], _: Words) -> Answer:
    return {
        "stamp": _stamp(tools.stamp(found)),
        "goes": any(job.state == "running" for job in found),
        "html": tools.shown(work, found, _),
    }


def _stamp(value: object) -> str:
    """Return a text that changes when what is shown does."""
    return f"{hash(value):x}"


def _changed(now: Answer, stamp: str) -> Answer:
    return {"goes": now["goes"]} if now["stamp"] == stamp else now


def rename(work: Workplace, asked: NewName, _: Words) -> Answer:
    """Give a file another name; return the address of its page."""
    return {"to": view.page_url(lora_files.rename(work, asked.file, asked.name))}


def note(work: Workplace, asked: Note, _: Words) -> Answer:
    """Keep a note on a file."""
    file = lora_files.take_note(work, asked.file, asked.text)
    return {"done": _("Noted."), "head": view.head_html(file, _)}


def texts(work: Workplace, asked: Texts, _: Words) -> Answer:
    """Write what is told of a file into its header."""
    changed = describe.save_texts(find(work, asked.file), asked.model_dump(exclude={"file"}))
    done = _("Saved: {}.", ", ".join(changed)) if changed else _("Nothing was changed.")
    return {"done": done, "head": view.head_html(find(work, asked.file), _)}


def preview(work: Workplace, asked: Preview, _: Words) -> Answer:
    """Make a picture the preview of a file: one that was drawn with it, or one that was sent."""
    file = find(work, asked.file)
    if asked.batch is not None:
        written = _sent_preview(work, file, batch=asked.batch, name=asked.name)
    elif asked.choice is not None:
        written = describe.write_preview(file, describe.chosen_preview(work, file, asked.choice))
    else:
        raise RequestError("no picture is named", fix="choose one")
    return {
        "done": _("The preview is now {}, beside the LoRA.", written.name),
        "choices": render("library/choices.html", _, choices=describe.shown_choices(work, file)),
        "head": view.head_html(file, _),
    }


def _sent_preview(work: Workplace, file: LoraFile, *, batch: str, name: str) -> Path:
    """Make the one picture of an upload the preview, and forget it; `name` is what its sender calls it."""
    folder = uploads.batch_folder(work, batch)
    picture = folder / (safe_name(name) or "0")
    try:
        (folder / "0").rename(picture)
        return describe.write_preview(file, picture)
    except FileNotFoundError:
        raise InputError("the picture did not arrive", fix="choose it once more") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(work: Workplace, asked: OfLora, _: Words) -> Answer:
    """Return what others will miss in a file."""
    file = find(work, asked.file)
    found = sharing.remarks(inspect_file(file.path), preview=preview_of(file))
    return {"html": render("library/exported.html", _, problems=view.problems(found, _))}


def export(work: Workplace, asked: Export, _: Words) -> Answer:
    """Write a file with its preview and card into a folder; return where, and what others will miss."""
    file = find(work, asked.file)
    target = file.path.parent / EXPORTS
    if asked.folder.strip():
        target = work.path(asked.folder, what="a folder for the files")
    done, found = sharing.export_checked(file, target, weight=asked.weight, notes=asked.notes)
    folder = done.files[0].parent
    inside_run = folder == file.path.parent / EXPORTS
    files = [
        (path.name, run_url(file.run, EXPORTS, path.name) if inside_run else "")
        for path in done.files
    ]
    html = render(
        "library/exported.html",
        _,
        folder=folder,
        files=files,
        was_there=done.was_there,
        problems=view.problems(found, _),
    )
    return {"html": html}


def inside(work: Workplace, asked: OfLora, _: Words) -> Answer:
    """Read all tensors of a file, which takes a moment for a large one: only where somebody looks."""
    return {"html": view.inside(inspect_file(find(work, asked.file).path), _)}
