"""The parts of a run's page, each with a key that says when it has to be drawn again.

Inputs: a look at a run and its records. Outputs: escaped markup and plain JSON, drawn only when asked
for: most ticks change the head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_trainer.reporting.charts import Html, tag
from lora_trainer.reporting.history import RunHistory
from lora_trainer.reporting.report_curves import loss_curve
from lora_trainer.run.run_folder import BEST_RECORD

from . import launch, state
from .media import REPORT
from .run_best import exports, read_best
from .run_files import files_html
from .run_follow import Records
from .run_log import log
from .run_samples import sample_sheet
from .run_settings import settings_html
from .run_state import Look, possible
from .run_view import head

_REDRAWS = 200
"""How often a chart is drawn anew while its length doubles at most."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something of the page: `draw` makes it, equal keys make the same."""

    key: object
    draw: Callable[[], Any]


def parts(seen: Look, records: Records) -> Mapping[str, Part]:
    """Return the parts of the page of a run."""
    folder, history = seen.folder, records.history
    exported, best = exports(folder, history), read_best(folder)
    files = (dict(exported), best, (folder / REPORT).is_file())
    shown = head(seen, history)
    return {
        "head": Part(key=shown, draw=lambda: shown),
        "buttons": Part(key=possible(seen), draw=lambda: possible(seen)),
        "where": _where(seen),
        "chart": Part(key=_chart_key(history), draw=lambda: _chart(history)),
        "samples": Part(
            key=(len(history.samples), history.sessions, *files),
            draw=lambda: sample_sheet(folder, history, exported=exported, best=best),
        ),
        "log": Part(key=list(records.recent), draw=lambda: log(records.recent)),
        "settings": Part(key=history.run, draw=lambda: settings_html(history.run)),
        "files": Part(key=files, draw=lambda: files_html(folder, exported=exported, best=best)),
    }


def damaged_parts(seen: Look, reason: str) -> Mapping[str, Part]:
    """Return the parts for a folder whose records cannot be read: why, and the buttons."""
    told = tag("p", reason, class_="notice error")
    empty = {name: Part(key="", draw=lambda: Html("")) for name in ("chart", "settings", "files")}
    return {
        "head": Part(key=told, draw=lambda: told),
        "buttons": Part(key=possible(seen), draw=lambda: possible(seen)),
        "where": _where(seen),
        "samples": Part(key="", draw=lambda: None),
        "log": Part(key=told, draw=lambda: told),
        **empty,
    }


def stamp(seen: Look) -> state.Stamp:
    """Return a value that changes when any part may."""
    return (
        *state.stamp(seen.folder, seen.status),
        state.file_stamp(seen.folder / BEST_RECORD),
        seen.may_be_ended,
        seen.queued,
        int(seen.silent_s // 60),
    )


def _where(seen: Look) -> Part:
    """Return whether somebody has to say where the images of a run are before it can go on."""
    unknown = possible(seen).resume and launch.recorded_dataset(seen.folder) is None
    return Part(key=unknown, draw=lambda: unknown)


def _chart(history: RunHistory) -> Html:
    if not history.steps:
        return tag("p", "The curve of the loss begins with the first step.", class_="quiet")
    return loss_curve(history)


def _chart_key(history: RunHistory) -> object:
    """Return a key that changes about as often as a new step can be seen in the chart."""
    count = len(history.steps)
    stride = max(1, count // _REDRAWS)
    ended = None if history.end is None else history.end.get("event")
    return (stride, count // stride, len(history.validations), len(history.marks), ended)
