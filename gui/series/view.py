"""What the page of a series shows: its trainings with what they differ by, their curves, and their pictures by prompt.

Input: a series (variants.py) or the folder of a study of `lora-train tune`, and the runs of both. Output: what
members.html shows. How good each is, is said as on its own page (run_best.py), and of a series that decides which did
best. Of a study `tune` has decided it by the gain (docs/scores.md), which is shown beside.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.queue import commands
from lora_trainer.queue.rules import read_rules
from lora_trainer.reporting.best_step import AS_GOOD, Standing
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import SampleImage, read_history
from lora_trainer.reporting.status import read_status
from lora_trainer.tuning.space import keys_of
from lora_trainer.tuning.study import STUDY_FILE, read_record
from lora_trainer.tuning.tune import gains_of

from .. import runs, variants
from ..clock import clock_text
from ..held_out_chart import COLOURS, Learned, held_out_chart
from ..lora_files import result_of
from ..markup import setting_said
from ..media import run_url
from ..queue.times import dataset_of
from ..run.starting import shown_photos
from ..run_best import losses, standing_of
from ..run_state import FINISHING, left_text
from ..server.templates import render
from ..server.translation import Words
from ..variants import MAX_TRAININGS
from ..workplace import Workplace

PAGE = "/series"
SEED = "train.seed"
_TRIAL = "-trial-"
# As many lines as the style sheet tells apart; further ones begin again.
_PICTURES_OF_CARD = 4
# A training that the queue has begun has no run before its program has started.
_GOING = ("waiting", "starting", "running")
_WITHOUT_RUN = ("waiting", "starting")
_GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a page is of: its heading, the settings that are varied, and the run of each training with its values.

    A value that is missing is the one that the plan of the run chose; before it begins, the one of `planned`.
    """

    label: str
    keys: tuple[str, ...]
    runs: tuple[tuple[str, Mapping[str, Any]], ...]
    is_study: bool = False
    planned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the records of a run say that the page shows; losses on held-out images and gains by step."""

    settings: Mapping[str, Any]
    good: Standing | None
    base_loss: float
    losses: Mapping[int, float]
    gains: Mapping[int, float]
    images: Sequence[SampleImage]
    dataset: str = ""
    """The fingerprint of what it learned from, empty until it is known."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training of the series as far as it is: of one that runs `fraction` of 1, and `left`, its time left."""

    name: str
    label: str
    state: str
    recorded: Recorded
    fraction: float = 0.0
    left: str = ""

    @property
    def best(self) -> int | None:
        """The step to take, None before the first validation."""
        return None if self.recorded.good is None else self.recorded.good.step

    @property
    def gain(self) -> float | None:
        """The largest gain, as `tune` compares trials."""
        return max(self.recorded.gains.values(), default=None)

    def rank(self, *, is_study: bool) -> float | None:
        """Return by what the best is found, the more the better; None before the first validation."""
        good = self.recorded.good
        if is_study:
            return self.gain
        return None if good is None or math.isnan(good.gain) else good.gain

    @property
    def shown_step(self) -> int | None:
        """The step whose pictures are shown: of those that have any the nearest to the best, else the last."""
        steps = sorted({image.step for image in self.recorded.images if image.step})
        wanted = self.best if self.best is not None else max(steps, default=0)
        return min(steps, key=lambda step: abs(step - wanted), default=None)


_NOTHING = Recorded(settings={}, good=None, base_loss=math.nan, losses={}, gains={}, images=())


def page_url(series: str) -> str:
    """Return the address of the page of a series."""
    return f"{PAGE}?{urlencode({'id': series})}"


def study_url(name: str) -> str:
    """Return the address of the page of a study."""
    return f"{PAGE}?{urlencode({'study': name})}"


def named(work: Workplace, *, series: str, study: str) -> Named:
    """Return what a page is of; raises RequestError for an unknown series or study."""
    if study:
        return _of_study(work, study)
    found = variants.read(work, series)
    # Those of earlier versions were queued in another order.
    members = variants.in_order(found.members, keys=found.keys, planned=found.planned)
    names = variants.runs_of(work, members)
    values = [member.values for member in members]
    together = tuple(zip(names, values, strict=True))
    return Named(label=found.label, keys=found.keys, runs=together, planned=found.planned)


def _of_study(work: Workplace, name: str) -> Named:
    """Return the trials of a study; its storage is not opened, as their runs say the same."""
    if name not in studies(work):
        raise RequestError(f"no study is named {name[:40]!r}", fix="choose one from the list")
    record = read_record(work.runs / name)
    keys = tuple(key for dimension in record.space for key in keys_of(dimension))
    trials = [path.name for path in work.runs.glob(f"*{_TRIAL}*")]
    own = [trial for trial in trials if trial.rpartition(_TRIAL)[0] == record.name]
    own.sort(key=lambda trial: (len(trial), trial))  # trial-2 before trial-10
    return Named(
        label=record.name, keys=keys, runs=tuple((trial, {}) for trial in own), is_study=True
    )


def studies(work: Workplace) -> list[str]:
    """Return the names of the folders of studies, the newest first."""
    found = [file.parent for file in work.runs.glob(f"*/{STUDY_FILE}")]
    return [path.name for path in sorted(found, key=lambda path: path.name, reverse=True)]


def shelf(work: Workplace, _: Words) -> Mapping[str, Any]:
    """Return what list.html shows: all series and studies."""
    made = [
        _card(work, page_url(each.id), named(work, series=each.id, study=""), _)
        for each in variants.find(work)
    ]
    found = []
    for name in studies(work):
        try:
            study = _of_study(work, name)
        except LoraTrainError:  # damaged: its own page says how
            study = Named(label=name, keys=(), runs=(), is_study=True)
        found.append(_card(work, study_url(name), study, _))
    return {"series": made, "studies": found}


def _card(work: Workplace, url: str, found: Named, _: Words) -> Mapping[str, Any]:
    """Return the card of a series: how far it is, which did best, the first prompt as several of them draw it."""
    trained = _all_trained(work, found, _)
    leading = _best(trained, is_study=found.is_study)
    best = leading[0] if len(leading) == 1 else None
    cells = next(_pictures(trained), {"cells": ()})["cells"]
    return {
        "url": url,
        "name": found.label,
        "keys": ", ".join(setting_said(key, _) for key in found.keys),
        "count": len(trained),
        "chips": [{"text": _chip(each, found, _), "best": each in leading} for each in trained],
        "trained": sum(each.state not in _GOING for each in trained),
        "best": "" if best is None else best.label,
        "equal": "" if best else ", ".join(each.label for each in leading),
        "said": "" if best is None or best.recorded.good is None else best.recorded.good.said,
        "pictures": [cell for cell in cells if cell["url"]][:_PICTURES_OF_CARD]
        or [{"url": src, "label": ""} for src in _images(work, found)[:_PICTURES_OF_CARD]],
    }


def _images(work: Workplace, found: Named) -> list[str]:
    """Return the first images that trainings learn which wait in the queue."""
    names = {name for name, _ in found.runs}
    waiting = (item for item in commands.in_order(commands.items(work.runs)) if item.label in names)
    dataset = next((folder for item in waiting if (folder := dataset_of(item))), None)
    return [photo.src for photo in shown_photos(work, dataset)]


def _chip(trained: Trained, found: Named, _: Words) -> str:
    """Return by what a training differs from the others, without the name of the setting where all differ by one."""
    if len(found.keys) != 1:
        return trained.label
    return trained.label.removeprefix(f"{setting_said(found.keys[0], _)} ")


def _best(trained: Sequence[Trained], *, is_study: bool) -> list[Trained]:
    """Return the one that did best, or all that did practically as well; one alone is not the best of anything.

    Of a study `tune` has decided, by its own measure.
    """
    ranks = [(each, each.rank(is_study=is_study)) for each in trained]
    measured = [rank for _, rank in ranks if rank is not None]
    if len(measured) < 2:  # noqa: PLR2004 - two are compared
        return []
    lowest = max(measured)
    if not is_study:
        lowest = 1 - AS_GOOD * (1 - lowest)  # of a gain: what is left of the base's loss
    return [each for each, rank in ranks if rank is not None and rank >= lowest]


def _awaited(work: Workplace, _: Words) -> str:
    """Return what trainings that wait are waiting for."""
    running = [item.run for item in commands.items(work.runs) if item.state == "running"]
    left = {run: read_status(work.runs / run).left_s for run in running if run}
    if (
        not left
        and not running
        and not read_rules(work.runs).holds(now_s=time.time(), is_idle=False)
    ):
        return _("None has begun yet: the first one starts by itself in a moment.")
    if not left:
        return _("None has begun yet: they start as soon as the queue goes on.")
    first = min(left, key=lambda run: math.inf if math.isnan(left[run]) else left[run])
    if math.isnan(left[first]):
        return _("None has begun yet: the first one starts when {} ends.", first)
    now_s = time.time()
    at = _.message(clock_text(now_s + left[first], now_s=now_s))
    return _("None has begun yet: the first one starts when {} ends, at about {}.", first, at)


def members(work: Workplace, found: Named, _: Words) -> tuple[Html, bool]:
    """Return the trainings as markup, and whether any of them still changes."""
    trained = _all_trained(work, found, _)
    best = _best(trained, is_study=found.is_study)
    waiting = {
        item.label: (place, item.id)
        for place, item in enumerate(commands.in_order(commands.items(work.runs)), 1)
    }
    rows = [
        {
            **dict(zip(("place", "item"), waiting.get(each.name, (0, "")), strict=True)),
            "name": each.name,
            "label": each.label,
            "state": each.state,
            "fraction": each.fraction,
            "left": each.left,
            "finishes": each.left == FINISHING,
            "url": runs.page_url(each.name) if each.state not in _WITHOUT_RUN else "",
            "again": "/train?" + urlencode({"again": each.name}),
            "said": "" if each.recorded.good is None else each.recorded.good.said,
            "gain": "" if each.gain is None else f"{each.gain:.2%}",
            "step": "" if each.best is None else f"{each.best:,}",
            "best": [each] == best,
            "equal": each in best and len(best) > 1,
            "loras": _loras(work, each),
            "css": f"s{index % COLOURS}",
        }
        for index, each in enumerate(trained)
    ]
    goes = any(each.state in _GOING for each in trained)
    all_wait = bool(trained) and all(each.state == "waiting" for each in trained)
    html = render(
        "series/members.html",
        _,
        rows=rows,
        removed=bool(found.runs),
        waiting=[row["item"] for row in rows if row["place"]],
        awaited=_awaited(work, _) if all_wait else "",
        images=() if any(each.recorded.images for each in trained) else _images(work, found),
        best=best[0].label if len(best) == 1 else "",
        equal=", ".join(each.label for each in best) if len(best) > 1 else "",
        goes=goes,
        differ=len({each.recorded.dataset for each in trained} - {""}) > 1,
        chart=_chart(trained, _),
        columns=[
            (row["label"], row["css"], "" if each.shown_step is None else f"{each.shown_step:,}")
            for row, each in zip(rows, trained, strict=True)
        ],
        pictures=(pictures := list(_pictures(trained))),
        drawn_by_base=any(row["base"] for row in pictures),
        varies_seed=SEED in found.keys,
        is_study=found.is_study,
    )
    return html, goes


def _loras(work: Workplace, trained: Trained) -> Mapping[str, str]:
    """Return where the LoRA of a training is downloaded and tried; nothing before it has one."""
    if trained.state in _GOING or trained.state in _WITHOUT_RUN:
        return {}
    entry = result_of(work.runs / trained.name)
    if entry is None:
        return {}
    file = entry.file
    page = "/library?" + urlencode({"file": file.ref})
    return {"file": run_url(file.run, file.path.name), "page": page}


def _all_trained(work: Workplace, found: Named, _: Words) -> list[Trained]:
    """Return the trainings that there are: not those that were taken off the queue, or whose run was deleted."""
    trained = (_trained(work, found, name, values, _) for name, values in found.runs)
    return [each for each in trained if each.state != _GONE]


def _trained(
    work: Workplace, found: Named, name: str, values: Mapping[str, Any], _: Words
) -> Trained:
    fraction, left = 0.0, ""
    try:
        folder = runs.run_folder(work.runs, name)
    except RequestError:
        of_it = [item for item in commands.items(work.runs) if item.label == name]
        begun = any(item.state == "running" for item in of_it)
        waits = any(not item.has_ended for item in of_it)
        state = "starting" if begun else "waiting" if waits else _GONE
        recorded = _NOTHING
    else:
        status = read_status(folder)
        state = status.state
        if state == "running" and status.steps:
            fraction, left = status.step / status.steps, left_text(status)
        # The folder's own stamp: the step to take depends on which files are there.
        stamps = [runs.file_stamp(folder / file) for file in runs.RECORDS]
        recorded = _recorded(folder, (*stamps, runs.file_stamp(folder)))
    label = _label({**found.planned, **recorded.settings, **values}, found.keys, _)
    return Trained(
        name=name, label=label, state=state, recorded=recorded, fraction=fraction, left=left
    )


@lru_cache(maxsize=4 * MAX_TRAININGS)
def _recorded(folder: Path, stamp: runs.Stamp) -> Recorded:
    """Read a run once per version of its records, which `stamp` tells apart."""
    try:
        history = read_history(folder)
    except (RequestError, OSError):  # damaged, or removed meanwhile
        return _NOTHING
    base = history.base_validation
    return Recorded(
        settings=history.run.settings,
        good=standing_of(folder, history),
        base_loss=math.nan if base is None else base.loss,
        losses=losses(history),
        gains=gains_of(history),
        images=history.samples,
        dataset=history.run.dataset.fingerprint,
    )


def _label(values: Mapping[str, Any], keys: Sequence[str], _: Words) -> str:
    """Return what a training differs by; one that has not begun does not know what its plan will choose."""
    parts = []
    for key in keys:
        value = values.get(key, _("as planned"))
        shown = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{setting_said(key, _)} {_.value(shown)}")
    return ", ".join(parts)


def _chart(trained: Sequence[Trained], _: Words) -> Html | None:
    learned = [
        Learned(
            label=each.label,
            losses=each.recorded.losses,
            base_loss=each.recorded.base_loss,
        )
        for each in trained
    ]
    return held_out_chart(learned, _)


def _pictures(trained: Sequence[Trained]) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each prompt, those that all of them drew first; a picture that is not there has no address.

    `base` is what the base draws of it without a LoRA.
    """
    drawn = [
        {
            (image.prompt, image.seed): image
            for image in each.recorded.images
            if image.step == each.shown_step
        }
        for each in trained
    ]
    base = {
        (image.prompt, image.seed): run_url(each.name, *image.file.split("/"))
        for each in trained
        for image in each.recorded.images
        if not image.step
    }
    keys = dict.fromkeys(key for images in drawn for key in images)
    for prompt, seed in sorted(keys, key=lambda key: sum(key not in images for images in drawn)):
        found = [
            (each, images.get((prompt, seed))) for each, images in zip(trained, drawn, strict=True)
        ]
        cells = [
            {
                "label": each.label,
                "url": "" if image is None else run_url(each.name, *image.file.split("/")),
            }
            for each, image in found
        ]
        yield {"prompt": prompt, "base": base.get((prompt, seed), ""), "cells": cells}
