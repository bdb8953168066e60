"""The parts of a run's page, each with a key that says when it has to be drawn again.

Inputs: a look at a run and its records. Outputs: escaped markup and plain JSON, drawn only when asked
for: most ticks change the head alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.nvml import card_states
from lora_trainer.reporting.charts import Html, LossView, loss_curve
from lora_trainer.reporting.history import RunHistory, SampleImage
from lora_trainer.run.run_folder import BEST_RECORD

from .. import launch, state
from ..markup import delete_button, join, table, tag
from ..media import REPORT, run_url, samples_url
from ..run_best import Best, exports, losses, read_best, recommended
from ..run_settings import settings_html
from ..run_state import Look, possible
from ..state import Records
from .head import head, machine_now
from .log import log

# Records may name any file; a page leads to samples of this run only.
_IMAGE = re.compile(r"samples/step-\d{8,}/(asked-)?\d{2,}\.png")
# How often a chart is drawn anew while its length doubles at most.
_REDRAWS = 200


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


def _chart_key(history: RunHistory) -> tuple[object, ...]:
    """Return a key that changes about as often as a new step can be seen in the chart."""
    count = len(history.steps)
    stride = max(1, count // _REDRAWS)
    ended = None if history.end is None else history.end.get("event")
    return (stride, count // stride, len(history.validations), len(history.marks), ended)


def sample_sheet(
    folder: Path, history: RunHistory, *, exported: Mapping[int, str], best: Best | None
) -> dict[str, Any]:
    """Return prompts, steps and the images where they meet; a missing image is null.

    `best` is the step that somebody marked; without one the step that did best is shown as such.
    """
    take = recommended(exported, losses(history), best)
    newest = {(image.prompt, image.seed, image.step): image for image in history.samples}
    rows = list(dict.fromkeys((image.prompt, image.seed) for image in history.samples))
    steps = sorted({image.step for image in history.samples})
    return {
        "run": folder.name,
        "prompts": [{"text": prompt, "seed": seed} for prompt, seed in rows],
        "steps": [
            {
                "step": step,
                "name": f"step {step:,}" if step else "base",
                "file": run_url(folder.name, exported[step]) if step in exported else None,
                "best": take is not None and take.is_found and take.step == step,
                "marked": best is not None and best.step == step,
            }
            for step in steps
        ],
        "images": [
            [_address(folder, newest.get((prompt, seed, step))) for step in steps]
            for prompt, seed in rows
        ],
    }


def _address(folder: Path, image: SampleImage | None) -> str | None:
    if image is None or not _IMAGE.fullmatch(image.file):
        return None
    try:
        version = (folder / image.file).stat().st_mtime_ns
    except OSError:
        return None
    return f"{run_url(folder.name, *image.file.split('/'))}?v={version:x}"


def files_html(folder: Path, *, exported: Mapping[int, str], best: Best | None) -> Html:
    """Return the LoRA files with their download, the newest first, the best one on top."""
    rows = [
        _file_row(folder, exported[step], step=step, best=best) for step in sorted(exported)[::-1]
    ]
    if best is not None:
        rows.insert(0, _file_row(folder, best.file, step=best.step, best=None, best_of_all=True))
    listed = (
        table(("LoRA of", "file", "size", ""), rows, class_="files")
        if rows
        else tag("p", "No LoRA file yet: the first save writes one.", class_="quiet")
    )
    delete = delete_button("run", folder.name, name=folder.name, then="/")
    where = tag("p", "Folder: ", tag("code", str(folder.resolve())))
    return join((listed, _report(folder), _samples_zip(folder), where, tag("p", delete)))


def _samples_zip(folder: Path) -> Html:
    if not (folder / "samples").is_dir():
        return Html("")
    name = f"{folder.name}.zip"
    link = tag("a", "Download all samples", href=samples_url(folder.name), download=name)
    return tag("p", link, " as one zip.")


def _file_row(
    folder: Path, name: str, *, step: int, best: Best | None, best_of_all: bool = False
) -> tuple[str, ...]:
    marked = best is not None and best.step == step
    button = tag(
        "button",
        "\u2605 Marked as the best" if marked else "\u2606 Mark this as the best",
        type="button",
        data_best=step,  # names a step, which the page's handler checks
        disabled="" if marked else None,
        aria_label=f"Mark step {step} as the best",
    )
    link = tag("a", name, href=run_url(folder.name, name), download=name, translate="no")
    of = f"the best: step {step:,}" if best_of_all else f"step {step:,}"
    return of, link, _size(folder / name), "" if best_of_all else button


def _size(file: Path) -> str:
    try:
        return bytes_text(file.stat().st_size)
    except OSError:  # pruned since it was listed
        return "gone"


def _report(folder: Path) -> Html:
    if not (folder / REPORT).is_file():
        return tag("p", "The report is written when the training ends.", class_="quiet")
    href = run_url(folder.name, REPORT)
    link = tag("a", "Open the report", href=href, target="_blank", rel="noopener")
    return tag("p", link, ": curves, problems, dataset, settings, timings on one page.")
