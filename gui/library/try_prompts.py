"""Trying a LoRA: prompts at several strengths from the same seed, drawn by `lora-train sample`.

Inputs: a file of a run, prompts, strengths. Outputs: a job with its images in `<runs>/.gui/tries/ID/`,
and the grid prompt x strength, whatever is drawn of it so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.common.wording import one_line
from lora_trainer.config.prompt_line import plain_prompt, read_prompt
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.sample_files import last_samples, sample_prompt, try_names

from .. import command_lines, jobs, runs
from ..lora_files import Header, LoraFile, recorded_base
from ..markup import inline
from ..media import try_url
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace

KIND = "try"
STRENGTHS = (0.4, 0.6, 0.8, 1.0, 1.2)
SEED = 1234
MAX_PROMPTS, MAX_STRENGTHS, MAX_STRENGTH = 12, 12, 4.0
# A browser knows no larger whole numbers.
MAX_SEED = 2**53
SHOWN = 4
# Exit codes of a command that somebody ended.
STOPPED = frozenset({-15, 130, 143})


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be drawn; an empty base is the one that the file was trained on."""

    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    seed: int = SEED
    base: str = ""


def wish(*, prompts: str, strengths: str, seed: float | None, base: str) -> Wish:
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
    return Wish(prompts=lines, strengths=_strengths(strengths), seed=int(chosen), base=base.strip())


def _strengths(text: str) -> tuple[float, ...]:
    words = text.replace(",", " ").split()
    try:
        # As they stand in the names of the images.
        found = tuple(sorted({float(f"{float(word):g}") for word in words}))
    except ValueError:
        found = ()
    fits = all(math.isfinite(value) and abs(value) <= MAX_STRENGTH for value in found)
    if not (1 <= len(found) <= MAX_STRENGTHS and fits):
        raise RequestError(
            f"{text!r} are not strengths",
            fix=f"type up to {MAX_STRENGTHS} numbers from -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}, "
            "such as 0.6 0.8 1",
        )
    return found


def start(work: Workplace, file: LoraFile, asked: Wish) -> jobs.Job:
    """Draw; raises RequestError while another try draws, InputError for a base that may not be named."""
    if any(job.state == "running" for job in jobs.find(work, kind=KIND)):
        raise RequestError("images are being drawn already", fix="wait for them, or stop them")
    name = f"{time.time_ns():x}"
    folder = work.own / "tries" / name
    argv = [
        *command_lines.TRAINER,
        "sample",
        str(file.path),
        f"--output={folder}",
        f"--seed={asked.seed}",
    ]
    argv += [f"--prompt={prompt}" for prompt in asked.prompts]
    argv += [f"--strength={strength:g}" for strength in asked.strengths]
    argv += _base(work, file, asked.base)
    about = {
        "file": file.ref,
        "folder": name,
        "prompts": list(asked.prompts),
        "strengths": list(asked.strengths),
        "seed": asked.seed,
    }
    return jobs.start(work, kind=KIND, argv=argv, about=about)


def _base(work: Workplace, file: LoraFile, typed: str) -> command_lines.Words:
    """Name the base; a header names it without its folder, the record of the run with it."""
    if typed:
        return command_lines.base_words(typed, work)
    recorded = recorded_base(file)
    return (f"--base={recorded}",) if recorded else ()


def warning(work: Workplace) -> str:
    """Return what to know before drawing, an empty text for nothing."""
    if any(run.status.state == "running" for run in runs.find_runs(work.runs)):
        return (
            "A training runs here: drawing shares the machine with it, and may run out of memory."
        )
    return ""


def example_prompt(file: LoraFile, header: Header) -> str:
    """Return a prompt to begin with: that of the run's last sample, else the trigger."""
    samples = last_samples(file.path.parent / "samples") if file.trained else []
    if not samples:
        return header.trigger
    try:
        return one_line(sample_prompt(samples[0])) or header.trigger
    except (OSError, ValueError, SyntaxError):  # not a picture, or being written
        return header.trigger


def of_file(work: Workplace, file: LoraFile) -> list[jobs.Job]:
    """Return the newest tries of a file."""
    found = [job for job in jobs.find(work, kind=KIND) if file.was(job.about.get("file"))]
    return found[:SHOWN]


def stamp(work: Workplace, tries: Sequence[jobs.Job]) -> tuple[object, ...]:
    """Return a value that changes when what is shown of these tries does."""
    return tuple((job.id, job.state, len(images(work, job))) for job in tries)


def images(work: Workplace, job: jobs.Job) -> dict[tuple[int, float], Path]:
    """Return what is drawn so far, by the place of its prompt and its strength."""
    folder = work.own / "tries" / Path(str(job.about.get("folder"))).name
    try:
        there = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
    except OSError:  # none yet
        return {}
    stem, strengths = _stem(job), _numbers(job)
    try:
        prompts = [read_prompt(line) for line in _prompts(job)]
    except RequestError:  # of a job of an earlier version, or a record that was changed
        prompts = [plain_prompt(line) for line in _prompts(job)]
    names = try_names(stem, prompts, seed=_seed(job), strengths=strengths)
    return {place: there[name] for place, name in names.items() if name in there}


def shown(work: Workplace, tries: Sequence[jobs.Job], _: Words) -> Html:
    """Return the newest try as a grid, and earlier ones folded."""
    return render("library/tries.html", _, tries=[_try(work, job, _) for job in tries])


def _try(work: Workplace, job: jobs.Job, _: Words) -> Mapping[str, Any]:
    """Return what tries.html shows of one: a row for each prompt, in it a cell for each strength."""
    found, strengths, prompts = images(work, job), _numbers(job), _prompts(job)
    rows = [
        {
            "prompt": prompt,
            "cells": [
                {"strength": f"{value:g}", "url": _url(found.get((row, value)))}
                for value in strengths
            ],
        }
        for row, prompt in enumerate(prompts)
    ]
    return {
        "id": job.id,
        "said": _said(job, len(found), len(strengths) * len(prompts), _),
        "error": "" if _was_stopped(job) else inline(_.message(job.error())),
        "draws": job.state == "running",
        "strengths": [f"{value:g}" for value in strengths],
        "rows": rows,
    }


def _was_stopped(job: jobs.Job) -> bool:
    return job.state != "failed" or job.exit_code in STOPPED


def _said(job: jobs.Job, done: int, count: int, _: Words) -> str:
    if job.state == "running":
        if not done:
            return _("Drawing: loading the base model.")
        return _("Drawing: {} of {} images.", done, count)
    if job.state == "failed":
        ended = "Stopped after {} of {} images."
        return _(ended if _was_stopped(job) else "Ended after {} of {} images.", done, count)
    done_text = "{#} images, seed {#} in the first row, one more in each row."
    return _(done_text, count, _seed(job))


def _url(image: Path | None) -> str:
    return try_url(image.parent.name, image.name) if image is not None else ""


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


def _stem(job: jobs.Job) -> str:
    return Path(str(job.about.get("file"))).stem
