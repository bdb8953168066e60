"""Trying a LoRA: prompts at several strengths from the same seed, also of other saves of its training and other LoRAs.

Inputs: files of the library, prompts, strengths. Outputs: a job that the process of drawing.py draws, with its images
in `<runs>/.gui/tries/ID/`, the grid of prompts by files and strengths, whatever is drawn of it so far, and which
picture was marked as the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.wording import bytes_text, one_line
from lora_trainer.config.prompt_line import SamplePrompt, plain_prompt, read_prompt, seeds
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.sample_files import last_samples, sample_prompt, try_names

from .. import command_lines, drawing, jobs, lora_files, runs
from ..lora_files import Header, LoraFile, recorded_base
from ..lora_names import BestPicture
from ..markup import inline
from ..media import try_url
from ..run_state import rough_text
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace

KIND = "try"
STRENGTHS = (0.4, 0.6, 0.8, 1.0, 1.2)
SEED = 1234
MAX_PROMPTS, MAX_STRENGTHS, MAX_STRENGTH, MAX_FILES = 12, 12, 4.0, 8
MAX_IMAGES = 200
# A browser knows no larger whole numbers.
MAX_SEED = 2**53
SHOWN = 4
# Exit codes of a job that somebody stopped; of an earlier version, -15.
STOPPED = frozenset({-15, drawing.STOPPED})


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be drawn; an empty base is the one that each file was trained on.

    `others` are the names of further files that draw the same.
    """

    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    seed: int = SEED
    base: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A file that a job draws with: its name in the library, and the folder of its images."""

    ref: str
    folder: str

    @property
    def stem(self) -> str:
        """Its name without the run and the ending, as it was then."""
        return Path(self.ref).stem


@dataclass(frozen=True, kw_only=True)
class Place:
    """A picture of a grid: the prompt's row, the file's place, the strength."""

    row: int
    file: int
    strength: float


def wish(
    *, prompts: str, strengths: str, seed: float | None, base: str, others: Sequence[str] = ()
) -> Wish:
    """Read what was typed: a prompt a line, strengths with spaces or commas between.

    Raises RequestError for what cannot be drawn.
    """
    lines = tuple(dict.fromkeys(line.strip() for line in prompts.splitlines() if line.strip()))
    if not 1 <= len(lines) <= MAX_PROMPTS:
        raise RequestError(
            f"{len(lines)} prompts are given", fix=f"type 1 to {MAX_PROMPTS}, each on its own line"
        )
    for line in lines:
        read_prompt(line)
    chosen = float(SEED if seed is None else seed)
    if not chosen.is_integer() or not 0 <= chosen < MAX_SEED:
        raise RequestError(f"{chosen:g} is not a seed", fix="type a whole number from 0")
    files = tuple(dict.fromkeys(others))
    if len(files) >= MAX_FILES:
        raise RequestError(
            f"{len(files) + 1} files are chosen",
            fix=f"choose at most {MAX_FILES}, this one among them",
        )
    found = _strengths(strengths)
    count = len(lines) * len(found) * (len(files) + 1)
    if count > MAX_IMAGES:
        raise RequestError(
            f"these are {count} images", fix=f"choose fewer; at most {MAX_IMAGES} are drawn at once"
        )
    return Wish(prompts=lines, strengths=found, seed=int(chosen), base=base.strip(), others=files)


def _strengths(text: str) -> tuple[float, ...]:
    typed = text.replace(",", " ").split()
    wrong = [word for word in typed if not _is_strength(word)]
    # As they stand in the names of the images.
    found = tuple(sorted({float(f"{float(word):g}") for word in typed if word not in wrong}))
    if wrong or not 1 <= len(found) <= MAX_STRENGTHS:
        said = " ".join(wrong) or text
        raise RequestError(
            f"{said!r} are not strengths",
            fix=f"type up to {MAX_STRENGTHS} numbers from -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}, "
            "such as 0.6 0.8 1",
        )
    return found


def _is_strength(word: str) -> bool:
    try:
        value = float(word)
    except ValueError:
        return False
    return math.isfinite(value) and abs(value) <= MAX_STRENGTH


def start(work: Workplace, file: LoraFile, asked: Wish) -> jobs.Job:
    """Have it drawn; raises RequestError while another try draws, InputError for a base that may not be named."""
    if any(job.state == "running" for job in jobs.find(work, kind=KIND)):
        raise RequestError("images are being drawn already", fix="wait for them, or stop them")
    others = [lora_files.find(work, ref) for ref in asked.others]
    name = f"{time.time_ns():x}"
    folder = work.own / "tries"
    draws = [
        {
            "file": each.ref,
            "path": str(each.path),
            "base": _base(work, each, asked.base),
            "folder": str(folder / (name if index == 0 else f"{name}-{index}")),
        }
        for index, each in enumerate((file, *others))
    ]
    about = {
        "file": file.ref,
        "folder": name,
        "files": draws,
        "prompts": list(asked.prompts),
        "strengths": list(asked.strengths),
        "seed": asked.seed,
        "typed_base": asked.base,
        "began_s": time.time(),
    }
    job = jobs.hand_over(work, kind=KIND, about=about)
    drawing.ask(work, job)
    return job


def _base(work: Workplace, file: LoraFile, typed: str) -> str:
    """Return the base to draw with; a header names it without its folder, the record of the run with it."""
    if not typed:
        return recorded_base(file)
    words = command_lines.base_words(typed, work)
    return words[0].removeprefix("--base=") if words else recorded_base(file)


def kept(work: Workplace, _: Words) -> str:
    """Return which base is loaded and what it takes, an empty text for none."""
    loaded = drawing.loaded(work)
    if loaded is None:
        return ""
    base, keeper = loaded
    size = bytes_text(keeper.gpu_bytes or keeper.ram_bytes)
    return _(
        "{} stays loaded ({#}) until {#} minutes after the last picture, or until a training needs its memory.",
        _.message(title(base)),
        _.message(size),
        f"{drawing.KEPT_S / 60:.0f}",
    )


def warning(work: Workplace) -> str:
    """Return what to know before drawing, an empty text for nothing."""
    if runs.trains(work.runs):
        return (
            "A training runs here: drawing shares the machine with it, and may run out of memory."
        )
    return ""


def form(file: LoraFile, header: Header, tries: Sequence[jobs.Job]) -> Mapping[str, Any]:
    """Return what the form begins with: what was drawn last with the file, else an example."""
    if not tries:
        return {
            "first_prompt": example_prompt(file, header),
            "strengths": _typed(STRENGTHS),
            "seed": SEED,
            "typed_base": header.usual_base if file.is_brought else "",
            "beside": (),
        }
    last = tries[0]
    return {
        "first_prompt": "\n".join(_prompts(last)),
        "strengths": _typed(_numbers(last)),
        "seed": _seed(last),
        "typed_base": str(last.about.get("typed_base") or ""),
        "beside": [each.ref for each in _files(last)[1:]],
    }


def _typed(strengths: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in strengths)


def example_prompt(file: LoraFile, header: Header) -> str:
    """Return a prompt to begin with: that of the run's last sample, else the trigger."""
    samples = last_samples(file.path.parent / "samples") if file.trained else []
    if not samples:
        return header.trigger
    try:
        return one_line(sample_prompt(samples[0])) or header.trigger
    except (OSError, ValueError, SyntaxError):  # not a picture, or being written
        return header.trigger


def of_file(work: Workplace, file: LoraFile, *, all_of_them: bool = False) -> list[jobs.Job]:
    """Return the newest tries of a file."""
    found = [job for job in jobs.find(work, kind=KIND) if file.was(job.about.get("file"))]
    return found if all_of_them else found[:SHOWN]


def others(
    work: Workplace, file: LoraFile, header: Header
) -> tuple[list[LoraFile], list[LoraFile]]:
    """Return what can be drawn beside a file: the other saves of its training, other LoRAs of the same base."""
    saves, more = list[LoraFile](), list[LoraFile]()
    for entry in lora_files.entries(work):
        brought = file.is_brought or entry.file.is_brought
        if entry.file.ref == file.ref:
            saves += entry.saves
        elif entry.file.run == file.run and not brought:
            saves += [each for each in (entry.file, *entry.saves) if each.ref != file.ref]
        elif entry.header.base == header.base or (
            # Other trainers name a base in other ways.
            brought and entry.header.family == header.family and not entry.header.is_try_out
        ):
            more.append(entry.file)
    return saves, more


def stamp(work: Workplace, tries: Sequence[jobs.Job]) -> tuple[object, ...]:
    """Return a value that changes when what is shown of these tries does."""
    shown = tuple(
        (job.id, job.state, len(images(work, job)), best(work, job), _far(job)) for job in tries
    )
    return shown, drawing.loaded(work) is not None, drawing.waits(work)


def images(work: Workplace, job: jobs.Job) -> dict[Place, Path]:
    """Return what is drawn so far."""
    strengths, prompts = _numbers(job), _read(job)
    found = {}
    for index, each in enumerate(_files(job)):
        folder = work.own / "tries" / each.folder
        try:
            there = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
        except OSError:  # none yet
            continue
        names = try_names(each.stem, prompts, seed=_seed(job), strengths=strengths)
        for (row, strength), name in names.items():
            if name in there:
                found[Place(row=row, file=index, strength=strength)] = there[name]
    return found


def mark(work: Workplace, file: LoraFile, job_id: str, place: Place | None) -> None:
    """Have a picture of one of the file's tries as the best of the file it was drawn with, or no longer; None: none.

    Raises RequestError for a picture that is not there, MachineError.
    """
    job = next((job for job in of_file(work, file, all_of_them=True) if job.id == job_id), None)
    image = None if job is None or place is None else images(work, job).get(place)
    if job is None or place is None or image is None:
        raise RequestError("this picture is not there any more", fix="draw it again")
    drawn_with = lora_files.find(work, _files(job)[place.file].ref)
    if place in best(work, job):
        lora_files.unmark_picture(work, drawn_with.ref)
    else:
        lora_files.mark_picture(work, drawn_with.ref, image, _described(job, place))


def best(work: Workplace, job: jobs.Job) -> frozenset[Place]:
    """Return which pictures of a grid are marked as the best of their file."""
    found = set()
    for index, each in enumerate(_files(job)):
        try:
            marked = lora_files.find(work, each.ref).picture
        except RequestError:  # deleted meanwhile
            continue
        places = (
            Place(row=row, file=index, strength=strength)
            for row in range(len(_prompts(job)))
            for strength in _numbers(job)
        )
        if marked is not None:
            found |= {place for place in places if _described(job, place) == marked}
    return frozenset(found)


def _described(job: jobs.Job, place: Place) -> BestPicture:
    return BestPicture(
        prompt=_prompts(job)[place.row],
        seed=seeds(_read(job), _seed(job))[place.row],
        strength=place.strength,
    )


def shown(work: Workplace, tries: Sequence[jobs.Job], _: Words) -> Html:
    """Return the newest try as a grid, and earlier ones folded."""
    return render(
        "library/tries.html",
        _,
        tries=[_try(work, job, _) for job in tries],
        kept=kept(work, _),
        ghosts=[_.figure(f"{value:g}") for value in STRENGTHS],
    )


def _try(work: Workplace, job: jobs.Job, _: Words) -> Mapping[str, Any]:
    """Return what tries.html shows of one: a row for each prompt, in it a cell for each file and strength."""
    found, marked, files, prompts = images(work, job), best(work, job), _files(job), _prompts(job)
    columns = [(index, value) for index in range(len(files)) for value in _numbers(job)]
    far, rows = None if drawing.waits(work) is not None else _far(job), []
    # Between a saved picture and the first pass of the next one, what is told is of the one before.
    if far is not None and far.pictures != len(found):
        far = None
    # In the order in which they are drawn.
    next_place = next((place for place in _in_order(job) if place not in found), None)
    for row, prompt in enumerate(prompts):
        places = [Place(row=row, file=index, strength=value) for index, value in columns]
        cells = [
            {
                "name": f"{job.id} {place.row} {place.file} {place.strength!r}",
                "strength": f"{place.strength:g}",
                "of": files[place.file].stem if len(files) > 1 else "",
                "url": _url(found.get(place)),
                "best": place in marked,
                "far": far if place == next_place else None,
            }
            for place in places
        ]
        rows.append({"prompt": prompt, "cells": cells})
    return {
        "id": job.id,
        "said": _said(work, job, len(found), len(columns) * len(prompts), _),
        "error": _error(job, _),
        "draws": job.state == "running",
        "since_s": _since_s(job),
        "left": _left(job, len(columns) * len(prompts), _) if drawing.waits(work) is None else "",
        "beside": job.state == "running" and runs.trains(work.runs),
        "columns": [
            (files[index].stem if len(files) > 1 else "", f"{value:g}") for index, value in columns
        ],
        "rows": rows,
    }


def _far(job: jobs.Job) -> drawing.Far | None:
    """Return how far a job is that draws, None for every other."""
    return drawing.far(job) if job.state == "running" else None


def _left(job: jobs.Job, count: int, _: Words) -> str:
    """Return how long the rest takes at the pace so far; empty before the first steps."""
    far = _far(job)
    if far is None or math.isnan(left_s := far.left_s(count)):
        return ""
    return _("about {#} left", rough_text(left_s))


def _in_order(job: jobs.Job) -> Iterator[Place]:
    """Yield the places of a grid as they are drawn: a file after the other, a prompt at all strengths."""
    for file, row, strength in product(
        range(len(_files(job))), range(len(_prompts(job))), _numbers(job)
    ):
        yield Place(row=row, file=file, strength=strength)


def _since_s(job: jobs.Job) -> int:
    """Return for how many seconds a job has been drawing, the loading of its base with it."""
    began_s = job.about.get("began_s")
    return max(0, int(time.time() - began_s)) if isinstance(began_s, int | float) else 0


def _error(job: jobs.Job, _: Words) -> str:
    """Return why a try ended early, as markup; an empty text where it did not, or somebody stopped it."""
    if job.state != "failed" or job.exit_code in STOPPED:
        return ""
    if job.exit_code == drawing.GAVE_WAY:
        return _("A training or another program needed the memory. Draw again when it has ended.")
    if job.exit_code is None:
        return _(
            "The process that draws was ended, as happens when memory runs out. Draw fewer or smaller images, or end "
            "other programs, and press Draw again: it begins anew."
        )
    return inline(_.message(job.error()))


def _said(work: Workplace, job: jobs.Job, done: int, count: int, _: Words) -> str:
    if job.state == "running":
        if (pid := drawing.waits(work)) is not None:
            trains = [run for run in runs.find_runs(work.runs) if run.status.state == "running"]
            name = next((run.name for run in trains if run.status.pid == pid), "")
            if name := name or next((run.name for run in trains), ""):
                return _(
                    "Waits for the training {}, which needs the memory; it then goes on by itself.",
                    name,
                )
            return _("Waits for another program that needs the memory; it then goes on by itself.")
        if not done and drawing.far(job) is None:
            return _("Drawing: loading the base model.")
        return _("Drawing: {} of {} images.", done, count)
    if job.state == "failed":
        ended = "Stopped after {} of {} images."
        was_stopped = job.exit_code in STOPPED
        return _(ended if was_stopped else "Ended after {} of {} images.", done, count)
    if count == 1:
        return _("1 image, seed {#}.", _seed(job))
    done_text = "{#} images, seed {#} in the first row, one more in each row."
    if len(_prompts(job)) == 1:
        done_text = "{#} images, seed {#}."
    return _(done_text, count, _seed(job))


def _url(image: Path | None) -> str:
    return try_url(image.parent.name, image.name) if image is not None else ""


def _files(job: jobs.Job) -> list[Drawn]:
    """Return what a job draws with; jobs of earlier versions have one file."""
    found = [
        Drawn(ref=str(each.get("file")), folder=Path(str(each.get("folder"))).name)
        for each in _list(job, "files")
        if isinstance(each, dict)
    ]
    one = Drawn(ref=str(job.about.get("file")), folder=Path(str(job.about.get("folder"))).name)
    return found or [one]


def _read(job: jobs.Job) -> list[SamplePrompt]:
    try:
        return [read_prompt(line) for line in _prompts(job)]
    except RequestError:  # of a job of an earlier version, or a record that was changed
        return [plain_prompt(line) for line in _prompts(job)]


def _prompts(job: jobs.Job) -> list[str]:
    return [str(prompt) for prompt in _list(job, "prompts")]


def _numbers(job: jobs.Job) -> list[float]:
    return [float(value) for value in _list(job, "strengths") if isinstance(value, int | float)]


def _list(job: jobs.Job, key: str) -> list[Any]:
    found = job.about.get(key)
    return found if isinstance(found, list) else []


def _seed(job: jobs.Job) -> int:
    seed = job.about.get("seed")
    return seed if isinstance(seed, int) else SEED
