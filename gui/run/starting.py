"""A training that was started, up to the page of its run: what it waits for, and the images that it learns.

Inputs: a draft that was put into the queue, its item there. Outputs: markup, the address that its page leads to, and
the first images of a dataset with the part of each that is trained on. One that did not begin is a draft again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.dataset.slider_file import Direction, is_slider_file
from lora_trainer.queue import commands
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.status import read_status

from .. import command_lines, drafts, run_actions, runs, slider_words
from ..datasets import check
from ..datasets.view import CheckedPictures, placed
from ..drafts import Draft
from ..markup import capital, plain
from ..media import thumb_url
from ..plan_view import span
from ..run_state import FINISHING, Stage, downloading, left_text, setting_out
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace

_SHOWN = 24


@dataclass(frozen=True, kw_only=True)
class Starting:
    """What a training waits for; `url` is where its page leads, empty while it waits or has not begun."""

    name: str
    html: Html
    goes: bool
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A small copy of an image; what is trained of it is so wide for its height (`ratio`).

    The others say as CSS has it where the whole image lies around that part, in percent of it.
    """

    src: str
    ratio: str = "1"
    left: str = "0%"
    top: str = "0%"
    wide: str = "100%"
    tall: str = "100%"


def page_url(draft_id: str) -> str:
    """Return the address of the page of a training that was started."""
    return "/run?" + urlencode({"draft": draft_id})


def look(work: Workplace, draft: Draft, said: Words) -> Starting:
    """Return what a training waits for; one that did not begin becomes a draft again. Raises MachineError."""
    listed = commands.items(work.runs)
    item = next((item for item in listed if item.id == draft.started_as), None)
    name = (item.label if item is not None else "") or _label(work, draft)
    back = "/train?" + urlencode({"draft": draft.id})
    if not draft.started_as:
        return Starting(name=name, html=Html(""), goes=False, url=back)
    if item is not None and item.run:
        return Starting(name=name, html=Html(""), goes=False, url=runs.page_url(item.run))
    if item is not None and not item.has_ended:
        html = _waiting(work, draft, item, listed, said, name=name)
        return Starting(name=name, html=html, goes=True)
    with drafts.changing(work):
        drafts.save(work, replace(draft, started_as="", step=drafts.STEPS[-1]))
    reason = "it was taken off the queue" if item is None else item.error
    if item is not None and item.state == "stopped":
        reason = "it was stopped before it began"
    line = said.message(plain(reason or "the training ended before it began"))
    html = render("run/not_begun.html", said, reason=capital(line), back=back)
    return Starting(name=name, html=html, goes=False)


def _label(work: Workplace, draft: Draft) -> str:
    """Return what the queue and the bar call the training of a draft, also of one whose images are gone."""
    try:
        return command_lines.label_of(draft, work)
    except LoraTrainError:
        return draft.name or Path(draft.dataset).name


def stop(work: Workplace, draft: Draft) -> None:
    """Take a training that has no run yet off the queue, or end its program; raises RequestError, MachineError."""
    run_actions.withdraw(work, draft.started_as)


def seconds_ago(work: Workplace, draft: Draft) -> float | None:
    """Return how long ago the program of a training was started, None while it waits."""
    item = next((item for item in commands.items(work.runs) if item.id == draft.started_as), None)
    return None if item is None or item.started_s is None else time.time() - item.started_s


def chosen(draft: Draft, said: Words) -> Mapping[str, str]:
    """Return the base of a training, and how many steps and how long it takes, as far as it is known."""
    planned = draft.planned
    base, steps, range_s = (planned.get(key) for key in ("base", "steps", "range_s"))
    base = base or draft.base
    length = [said("{#} steps", f"{steps:,}")] if isinstance(steps, int) else []
    match range_s:
        case [int() | float() as shortest_s, int() | float() as longest_s]:
            length.append(said("takes {text}", span((shortest_s, longest_s), said)))
    return {
        "base": said.message(title(base))
        if isinstance(base, str) and base not in ("", "auto")
        else "",
        "length": ", ".join(length),
    }


def _waiting(
    work: Workplace,
    draft: Draft,
    item: commands.Item,
    listed: Sequence[commands.Item],
    said: Words,
    *,
    name: str,
) -> Html:
    running = [other for other in listed if other.state == "running"]
    waiting = [other for other in commands.in_order(listed) if other.order < item.order]
    before = [*running, *waiting] if item.state == "waiting" else []
    download = commands.download_of(work.runs, item)
    is_slider = draft.kind == drafts.SLIDER
    stages: Sequence[Stage] = () if before else setting_out(is_slider=is_slider)
    return render(
        "run/waiting.html",
        said,
        name=name,
        before=[_before(work, other) for other in before],
        is_download=download is not None,
        stages=stages if download is None else downloading(download, is_slider=is_slider),
    )


def _before(work: Workplace, item: commands.Item) -> Mapping[str, Any]:
    """Return what is said of a training that comes before: its name, and how far it is where it trains."""
    status = read_status(work.runs / item.run) if item.run and item.state == "running" else None
    left = "" if status is None else left_text(status)
    return {
        "name": item.label or item.run,
        "trains": item.state == "running",
        "fraction": status.step / status.steps if status is not None and status.steps else 0.0,
        "left": "" if left == FINISHING else left,
    }


def shown_photos(work: Workplace, dataset: Path | None) -> Sequence[Photo]:
    """Return the `photos` of a folder that a command names, which may be anything, where they may be shown."""
    try:
        is_shown = dataset is not None and work.allows(dataset.resolve())
    except (OSError, RuntimeError, ValueError):
        is_shown = False
    return photos(work, dataset) if dataset is not None and is_shown else ()


def photos(work: Workplace, folder: Path) -> Sequence[Photo]:
    """Return the first images of a dataset; none where it cannot be read, which the training itself says.

    A slider has no images. A file that was found unreadable is not trained on.
    """
    if not folder.is_dir():
        return ()
    try:
        pictures = list_dataset(folder, settings=DataSettings()).pictures
        values = check.known(work, folder, stamp="").values
    except (LoraTrainError, OSError):
        return ()
    checked = CheckedPictures.of(values, names=frozenset(picture.name for picture in pictures))
    readable = [picture for picture in pictures if not checked.is_unreadable(picture.name)]
    return [
        _photo(thumb_url(folder, picture.name), placed(checked.pictures.get(picture.name, {})))
        for picture in readable[:_SHOWN]
    ]


def learned(work: Workplace, dataset: Path | None) -> Mapping[str, Any]:
    """Return what learns.html shows: the images of a folder, or the words of a slider's file."""
    directions: Sequence[Direction] = ()
    if dataset is None:
        return {"photos": (), "directions": directions}
    if is_slider_file(dataset):
        with suppress(LoraTrainError, OSError):  # which the training itself says
            directions = tuple(slider_words.read(dataset))
    return {"photos": photos(work, dataset), "directions": directions}


def _photo(src: str, picture: Mapping[str, Any]) -> Photo:
    """Return an image that goes into what is trained of it; whole in a square before it was checked."""
    if "kept" not in picture:
        return Photo(src=src)
    left, top, right, bottom = picture["kept"]
    wide, tall = right - left, bottom - top
    high_px = tall * picture["height_px"]
    ratio = wide * picture["width_px"] / high_px if wide > 0 and high_px > 0 else math.nan
    if not (math.isfinite(ratio) and ratio > 0):
        return Photo(src=src)
    return Photo(
        src=src,
        ratio=f"{ratio:.3f}",
        left=f"{-100 * left / wide:.1f}%",
        top=f"{-100 * top / tall:.1f}%",
        wide=f"{100 / wide:.1f}%",
        tall=f"{100 / tall:.1f}%",
    )
