"""Captions written by a model: `lora-train caption` as a job, and how far it is.

Inputs: the dataset folder, the model, which images. Outputs: the job, and its state in a sentence,
read from the JSON lines that the command prints. The command keeps what it replaced by itself;
`take_back` asks it for that.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from lora_trainer.captioning import captioners
from lora_trainer.captioning.captioners import KNOWN, CaptioningModel
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.event_kinds import (
    Caption,
    Captioned,
    Downloading,
    Event,
    Problem,
    event_of_row,
)
from lora_trainer.common.events import json_row
from lora_trainer.common.wording import bytes_text, one_line
from lora_trainer.families.base.tables import is_trained_on_tags

from .. import command_lines, jobs
from ..jobs import Job
from ..workplace import Workplace

KIND = "caption"
MODELS = tuple(KNOWN)
# What the models that are offered first are offered for, in their order.
_OFFERED_FOR = {
    "sentences": "Sentences, for FLUX, Qwen, SD3 and photographs",
    "tags": "Tags, for Illustrious, Pony and other anime bases",
    "exact": "The most exact sentences, on a large GPU",
}
_LINES_READ = 400
_REACHED_WITHIN_S = 4.0


def models() -> list[dict[str, Any]]:
    """Return the known models: what each is called, what it is good for, what it takes, its licence.

    `offered_for` is said of the few that are offered first, in their order; the others have "".
    """
    first = {name: of for of, name in _offered().items()}
    order = [*first, *(name for name in KNOWN if name not in first)]
    return [
        {
            "name": name,
            "title": KNOWN[name].title,
            "good_for": KNOWN[name].good_for,
            "takes": _takes(KNOWN[name]),
            "licence": KNOWN[name].licence,
            "tags": KNOWN[name].writes == "tags",
            "offered_for": _OFFERED_FOR[first[name]] if name in first else "",
        }
        for name in order
    ]


def _takes(model: CaptioningModel) -> str:
    """Return in a sentence what a model needs of the disk and of the memory."""
    gigabytes, memory = f"{model.download_gb:g}", f"{model.memory_gib:g} GiB"
    if model.memory_8_bit_gib is not None:
        smaller = f"{model.memory_8_bit_gib:g} GiB"
        return f"{gigabytes} GB to download once, {memory} of memory, or {smaller} in 8 bits"
    return f"{gigabytes} GB to download once, {memory} of memory"


def _offered() -> dict[str, str]:
    """Return the models that are offered first on this machine, by what they are offered for."""
    here = ("gpu" if command_lines.has_gpu() else "cpu", "any")
    return {
        of: name
        for of in _OFFERED_FOR
        for name, model in KNOWN.items()
        if model.offered_for == of and model.offered_on in here
    }


def suggested(base: str) -> str:
    """Return the model whose captions read as those that a base was trained with: tags where its family says so.

    A base whose name says nothing has sentences, from the smallest model on a machine without a GPU.
    """
    return _offered()["tags" if is_trained_on_tags(base) else "sentences"]


def start(
    work: Workplace,
    root: Path,
    *,
    model: str,
    files: Sequence[str],
    trigger: str,
    replace: bool,
    prompt: str = "",
) -> Job:
    """Begin with these images, all without a caption where none are named; raises RequestError."""
    running = of_folder(work, root)
    if running is not None and running.state == "running":
        raise RequestError("captions are being written already", fix="wait for them, or stop them")
    if is_out_of_reach(model):
        if constants.HF_HUB_OFFLINE:
            raise RequestError(
                why_out_of_reach(model),
                fix="allow downloads there and press Start again, or write the captions here",
            )
        raise RequestError(
            why_out_of_reach(model),
            fix="connect this machine to the internet and press Start again, or write the captions here",
        )
    argv = [*command_lines.TRAINER, "caption", str(root), f"--model={model}", "--json"]
    argv += ["--overwrite"] if replace else []
    argv += [f"--trigger={trigger}"] if trigger else []
    argv += [f"--prompt={prompt.strip()}"] if prompt.strip() else []
    argv += [f"--images={name}" for name in files]
    return jobs.start(work, kind=KIND, argv=argv, about={"folder": str(root)})


def is_out_of_reach(model: str) -> bool:
    """Whether a model is not on this machine while the Hub cannot be reached."""
    return captioners.find(model).folder is None and not _reaches_hub()


def why_out_of_reach(model: str) -> str:
    """Return why a model cannot come, without a full stop, by the name that its card has."""
    known = KNOWN.get(model)
    name = model if known is None or known.title is None else known.title
    if constants.HF_HUB_OFFLINE:
        return f"{name} is not on this machine yet, and the page Machine is set to offline"
    return f"{name} is not on this machine yet, and huggingface.co cannot be reached"


def _reaches_hub() -> bool:
    """Whether a download can be tried; a proxy is believed."""
    if constants.HF_HUB_OFFLINE:
        return False
    parts = urlsplit(constants.ENDPOINT)
    if getproxies().get(parts.scheme) is not None:
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_REACHED_WITHIN_S).close()
    except OSError:
        return False
    return True


def of_folder(work: Workplace, root: Path) -> Job | None:
    """Return the newest job about a folder."""
    found = (job for job in jobs.find(work, kind=KIND) if job.about.get("folder") == str(root))
    return next(found, None)


def is_writing(job: Job | None) -> bool:
    """Whether more captions are to come; a process whose last one is written takes a moment to end."""
    if job is None or job.state != "running":
        return False
    last = next(
        (event for event in reversed([*_events(job)]) if not isinstance(event, Problem)), None
    )
    is_last = isinstance(last, Caption) and last.index == last.count
    return not (is_last or isinstance(last, Captioned))


def take_back(root: Path) -> str:
    """Remove what the last call wrote and put back what it replaced; return what was done."""
    answer = command_lines.ask(("caption", str(root), "--undo", "--json"))
    if answer.values is None:
        raise InputError(answer.error or "nothing was taken back", fix="look at the captions")
    counts = {name: len(answer.values.get(name, ())) for name in ("removed", "restored", "kept")}
    removed, restored, kept = counts["removed"], counts["restored"], counts["kept"]
    if kept:
        return f"{removed} captions removed, {restored} put back, {kept} left alone: edited since"
    return f"{removed} captions removed, {restored} put back"


def state(job: Job | None) -> dict[str, Any]:
    """Return how far a job is: {state, said, done, count, problems}."""
    if job is None:
        return {"state": "none", "said": "", "done": 0, "count": 0, "written": 0, "problems": []}
    events = list(_events(job))
    captions = [event for event in events if isinstance(event, Caption)]
    done, count = (captions[-1].index, captions[-1].count) if captions else (0, 0)
    ended = [event.written for event in events if isinstance(event, Captioned)]
    return {
        "state": job.state,
        "said": _said(job, events, done=done, count=count),
        "downloaded": _downloaded(events) if job.state == "running" else None,
        "done": done,
        "count": count,
        "written": max(ended, default=0),
        "problems": [_problem(event) for event in events if isinstance(event, Problem)][-20:],
    }


def _said(job: Job, events: Sequence[Event], *, done: int, count: int) -> str:
    if job.state == "failed":
        return job.error() or "stopped; the captions that were written stay"
    last = next((event for event in reversed(events) if not isinstance(event, Problem)), None)
    if isinstance(last, Captioned) and last.failed:
        return f"{last.written} captions written, {last.failed} images without"
    if isinstance(last, Captioned) or job.state == "finished":
        written = last.written if isinstance(last, Captioned) else 0
        return f"{written} captions written"
    if count:
        return f"{done} of {count} captions written"
    if isinstance(last, Downloading):
        model = one_line(last.model)
        if last.gigabytes is None:
            return f"downloading {model}"
        here = bytes_text(_bytes_here(last.model))
        return f"downloading {model}: {here} of about {bytes_text(last.gigabytes * 1e9)}"
    return "loading the model"


def _downloaded(events: Sequence[Event]) -> float | None:
    """Return which share of the model is here, None while nothing is downloaded or its size is not known."""
    last = events[-1] if events else None
    if not isinstance(last, Downloading) or not last.gigabytes:
        return None
    return min(1.0, _bytes_here(last.model) / (last.gigabytes * 1e9))


def _bytes_here(model: str) -> int:
    """Return how many bytes of a model lie in the Hub's cache, those of unfinished files too."""
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model, repo_type="model"))
    sizes = 0
    for file in (folder / "blobs").glob("*"):
        with suppress(OSError):  # finished or removed meanwhile
            sizes += file.stat().st_size
    return sizes


def _events(job: Job) -> Iterator[Event]:
    for line in job.log_tail(_LINES_READ):
        row = json_row(
            line.encode(errors="replace")
        )  # None for a word of a library, or half a line
        if row is not None and (event := event_of_row(row)) is not None:
            yield event


def _problem(problem: Problem) -> str:
    name = f"{problem.file} " if problem.file else ""
    return one_line(f"{name}{problem.what}. {problem.fix}")
