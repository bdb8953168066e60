"""Converting, cutting and merging the files of the library, through the commands for that.

Inputs: a file and what a form says. Outputs: jobs whose result lies beside the input under a name that
is free, and the list of them. The commands replace nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.wording import one_line
from lora_trainer.config.inputs import EMBEDDED
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.reporting.charts import Html

from .. import command_lines, jobs
from ..brought import SUFFIX
from ..lora_files import Header, LoraFile, find, recorded_base, unused
from ..markup import inline
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace
from .view import page_url

KIND = "tool"
FORMATS: tuple[str, ...] = get_args(FileFormat)
_READERS: Mapping[str, str] = {
    "kohya": "A1111, Forge, ComfyUI (kohya's names)",
    "diffusers": "diffusers, InvokeAI",
    "comfyui": "ComfyUI's own names",
}
MAX_RANK, MAX_WEIGHT = 4096, 10.0
SHOWN = 6


def formats(header: Header, _: Words) -> Sequence[Mapping[str, Any]]:
    """Return the names that a file can be given: for whom, why not, and which is chosen at first."""
    found: list[dict[str, Any]] = []
    for name, readers in _READERS.items():
        reason = _(_reason_against(name, header))
        chosen = not reason and not any(each["chosen"] for each in found)
        # The miniature's folder is one of diffusers (its README.md), which is all that reads it elsewhere.
        only = header.is_try_out and name == "diffusers" and not reason
        note = (
            _("In Python, with the miniature's folder; InvokeAI does not have it.")
            if only
            else reason
        )
        label = "diffusers" if only else _(readers)
        found.append(
            {"name": name, "label": label, "reason": reason, "note": note, "chosen": chosen}
        )
    return found


def _reason_against(format: str, header: Header) -> str:
    """Return why a file is not given these names, an empty text where it can be."""
    if header.format == format:
        return "This file has these names already."
    if header.is_try_out and not (format == "diffusers" and _is_whole(header)):
        return "These programs do not have the miniature."
    if header.family in families.NAMES and format in families.family(header.family).formats.refused:
        return "LoRAs of this base model are not read under these names."
    return ""


def _is_whole(header: Header) -> bool:
    """Whether a miniature is a pipeline that diffusers opens; that for edits is a denoiser alone."""
    return header.metadata.get("ss_sd_model_name") == EMBEDDED


def convert(work: Workplace, file: LoraFile, *, format: str, name: str) -> jobs.Job:
    """Write a file in other key names; raises RequestError for what cannot be."""
    if format not in FORMATS:
        raise RequestError(
            f"the format {format!r} is unknown", fix=f"use one of the formats {', '.join(FORMATS)}"
        )
    words = ("convert", str(file.path), f"--format={format}")
    return _start(work, file, words, name=name or f"{file.path.stem}-{format}")


def resize(
    work: Workplace, file: LoraFile, *, rank: str, energy_percent: str, name: str
) -> jobs.Job:
    """Cut a file to a lower rank, a share of what it does, or both, as typed; raises RequestError."""
    words: list[str] = ["resize", str(file.path)]
    label = []
    if rank.strip():
        words.append(f"--rank={_rank(rank)}")
        label.append(f"r{_rank(rank)}")
    if energy_percent.strip():
        percent = _number(energy_percent)
        if not 0 < percent < 100:
            raise RequestError(
                f"{percent:g} % cannot be kept", fix="type more than 0, less than 100"
            )
        words.append(f"--energy={percent / 100:g}")
        label.append(f"e{percent:g}")
    if not label:
        raise RequestError("nothing says how far to cut", fix="type a rank, a share, or both")
    return _start(work, file, words, name=name or "-".join([file.path.stem, *label]))


def merge(
    work: Workplace,
    file: LoraFile,
    *,
    weight: float | None,
    others: Sequence[tuple[str | None, float | None]],
    rank: str,
    name: str,
) -> jobs.Job:
    """Add files up, (name in the library, weight) each; an empty rank is exact. Raises RequestError."""
    parts = [(file, weight)]
    parts += [(find(work, ref), other) for ref, other in others if ref]
    if len(parts) < 2:
        raise RequestError("there is nothing to merge with", fix="choose another LoRA")
    words = ["merge", *(f"{part.path}:{_weight(value):g}" for part, value in parts)]
    if rank.strip():
        words.append(f"--rank={_rank(rank)}")
    return _start(work, file, words, name=name or f"{file.path.stem}-merged")


def of_file(work: Workplace, file: LoraFile) -> list[jobs.Job]:
    """Return the newest jobs that began with a file."""
    found = [job for job in jobs.find(work, kind=KIND) if file.was(job.about.get("file"))]
    return found[:SHOWN]


def stamp(found: Sequence[jobs.Job]) -> tuple[object, ...]:
    """Return a value that changes when what is shown of these jobs does."""
    return tuple((job.id, job.state) for job in found)


def shown(work: Workplace, found: Sequence[jobs.Job], _: Words) -> Html:
    """Return the jobs as a list, each with its result, its progress or its error."""
    return render("library/jobs.html", _, jobs=[_job(work, job, _) for job in found])


def _job(work: Workplace, job: jobs.Job, _: Words) -> Mapping[str, Any]:
    result = str(job.about.get("result"))
    facts = job.log_tail(8) if job.state == "finished" else []
    return {
        "what": str(job.about.get("what")),
        "state": job.state,
        "result": result,
        "name": result.partition("/")[2],
        "url": _url(work, result) if job.state == "finished" else "",
        "error": inline(_.message(job.error())),
        "facts": [one_line(line) for line in facts if not line.startswith("wrote ")],
    }


def _url(work: Workplace, ref: str) -> str:
    """Return the address of a result, an empty text where it is not there any more."""
    try:
        return page_url(find(work, ref))
    except LoraTrainError:
        return ""


def _start(work: Workplace, file: LoraFile, words: Sequence[str], *, name: str) -> jobs.Job:
    output = unused(
        file.path.with_name(f"{command_lines.run_name(name.removesuffix(SUFFIX))}{SUFFIX}")
    )
    base = recorded_base(file)
    argv = [*command_lines.TRAINER, *words, f"--output={output}"]
    argv += [f"--base={base}"] if base else []
    result = f"{file.run}/{output.name}"
    return jobs.start(
        work,
        kind=KIND,
        argv=argv,
        about={"file": file.ref, "what": f"{words[0]} {file.path.name}", "result": result},
    )


def _rank(text: str) -> int:
    value = _number(text)
    if not value.is_integer() or not 1 <= value <= MAX_RANK:
        raise RequestError(
            f"{value:g} is not a rank", fix=f"type a whole number from 1 to {MAX_RANK}"
        )
    return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{text.strip()!r} is not a number", fix="type one such as 8") from None


def _weight(value: float | None) -> float:
    if value is None or not math.isfinite(value) or value == 0 or abs(value) > MAX_WEIGHT:
        raise RequestError(
            f"{value} is not a weight", fix=f"type a number such as 0.5, at most {MAX_WEIGHT:g}"
        )
    return value
