"""The parts of a run's page, each with a key that says when it has to be drawn again.

Inputs: a look at a run and its records. Outputs: escaped markup and plain JSON, drawn only when asked
for: most ticks change the head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.hardware.nvml import card_states
from lora_trainer.reporting.charts import SMOOTHING, Html, LossView, loss_curve, tag
from lora_trainer.reporting.history import RunHistory
from lora_trainer.run.run_folder import BEST_RECORD

from . import launch, state
from .media import REPORT
from .run_best import exports, losses, read_best, recommended
from .run_files import files_html
from .run_follow import Records
from .run_log import log
from .run_samples import sample_sheet
from .run_settings import settings_html
from .run_state import Look, possible
from .run_view import head, machine_now

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
    best_step = shown_best(folder, history)
    shown = head(seen, history)

    def with_machine() -> Html:
        # The driver is asked when the head is drawn, not to find out whether it has changed.
        going = seen.status.state == "running"
        return head(seen, history, machine_now(seen.status, card_states())) if going else shown

    return {
        "head": Part(key=shown, draw=with_machine),
        "buttons": Part(key=possible(seen), draw=lambda: possible(seen)),
        "where": _where(seen),
        "chart": Part(
            key=(*_chart_key(history), best_step), draw=lambda: _chart(history, best_step)
        ),
        "samples": Part(
            key=(len(history.samples), history.sessions, *files),
            draw=lambda: sample_sheet(folder, history, exported=exported, best=best),
        ),
        "log": Part(key=list(records.recent), draw=lambda: log(records.recent)),
        "settings": Part(key=history.run, draw=lambda: settings_html(history.run)),
        "files": Part(key=files, draw=lambda: files_html(folder, exported=exported, best=best)),
    }


def shown_best(folder: Path, history: RunHistory) -> int:
    """Return the step that the chart marks as the best of those with a file, 0 for none."""
    take = recommended(exports(folder, history), losses(history), read_best(folder))
    return take.step if take is not None and take.is_found else 0


def damaged_parts(seen: Look, reason: str) -> Mapping[str, Part]:
    """Return the parts for a folder whose records cannot be read: why, and the buttons."""
    told = tag("p", reason, class_="notice error")
    empty = {name: Part(key="", draw=lambda: Html("")) for name in ("settings", "files")}
    blank = {"drawn": "", "steps": 0}
    return {
        "head": Part(key=told, draw=lambda: told),
        "buttons": Part(key=possible(seen), draw=lambda: possible(seen)),
        "where": _where(seen),
        "samples": Part(key="", draw=lambda: None),
        "chart": Part(key="", draw=lambda: blank),
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


def _chart(history: RunHistory, best: int) -> dict[str, Any]:
    """Return the chart as it is at first, and whether there is one to look at more closely."""
    if not history.steps:
        said = tag("p", "The curve of the loss begins with the first step.", class_="quiet")
        return {"drawn": said, "steps": 0}
    return {"drawn": loss_curve(history, LossView(best=best)), "steps": history.steps[-1].step}


def chart_view(asked: Mapping[str, Any], *, best: int = 0) -> LossView:
    """Return how a page asks to see the chart; raises RequestError for an answer it does not offer."""
    smoothing: Any = asked.get("smoothing")
    first, last = asked.get("first"), asked.get("last")
    if smoothing not in SMOOTHING or not isinstance(first, int) or not isinstance(last, int):
        raise RequestError("this view of the chart is not one of the page", fix="reload the page")
    return LossView(
        smoothing=smoothing,
        log=asked.get("log") is True,
        outliers=asked.get("outliers") is True,
        first=first,
        last=last,
        best=best,
    )


def _chart_key(history: RunHistory) -> tuple[object, ...]:
    """Return a key that changes about as often as a new step can be seen in the chart."""
    count = len(history.steps)
    stride = max(1, count // _REDRAWS)
    ended = None if history.end is None else history.end.get("event")
    return (stride, count // stride, len(history.validations), len(history.marks), ended)
