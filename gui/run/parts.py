"""The parts of a run's page, each with a key that says when it has to be drawn again.

Inputs: a look at a run and its records. Outputs: escaped markup and plain JSON, drawn only when asked
for: most ticks change the head alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.event_kinds import Event
from lora_trainer.reporting.charts import Html, LossView, loss_curve
from lora_trainer.reporting.history import RunHistory, SampleImage
from lora_trainer.reporting.strips import Strips, strips_of
from lora_trainer.run.run_folder import BEST_RECORD

from .. import command_lines, runs
from ..markup import tag
from ..media import REPORT, run_url, samples_url
from ..prompt_text import spoken_prompt
from ..run_best import Best, exports, losses, read_best, recommended
from ..run_settings import settings_html
from ..run_state import Look, possible
from ..runs import Records
from ..server.language import ENGLISH
from ..server.templates import render
from ..server.translation import Words
from .coach import coach_html, coach_key
from .film import film_key, film_of
from .head import figures, head, head_html, take_so_far
from .log import log

# Records may name any file; a page leads to samples of this run only.
_IMAGE = re.compile(r"samples/step-\d{8,}/(asked-)?\d{2,}\.png")
# How often a chart is drawn anew while its length doubles at most.
_REDRAWS = 200


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something of the page: `draw` makes it in a language, equal keys make the same."""

    key: object
    draw: Callable[[Words], Any]


def parts(seen: Look, records: Records) -> Mapping[str, Part]:
    """Return the parts of the page of a run."""
    folder, history = seen.folder, records.history
    exported, best = exports(folder, history), read_best(folder)
    files = (dict(exported), best, (folder / REPORT).is_file())
    best_step = shown_best(folder, history)
    shown, so_far = head(seen, history), take_so_far(seen, history)
    counted = tuple(figures(seen, history, best_step=best_step))
    strips = strips_of(history.samples)

    return {
        "head": Part(key=shown, draw=lambda _: head_html(shown, _)),
        "coach": Part(key=coach_key(history), draw=lambda _: coach_html(folder, history, _)),
        "buttons": Part(key=possible(seen), draw=lambda _: _buttons(seen)),
        "figures": Part(key=counted, draw=lambda _: render("run/figures.html", _, figures=counted)),
        "take": Part(key=so_far, draw=lambda _: render("run/take.html", _, shown=so_far)),
        "where": _where(seen),
        "chart": Part(
            key=(*_chart_key(history), best_step), draw=lambda _: _chart(history, best_step, _)
        ),
        "film": Part(
            key=film_key(history, best_step),
            draw=lambda _: film_of(folder, history, _, best_step=best_step),
        ),
        "samples": Part(
            key=(len(history.samples), history.sessions, *files),
            draw=lambda _: sample_sheet(folder, history, exported=exported, best=best, _=_),
        ),
        "strip": Part(
            key="" if strips is None else (strips, seen.status.state),
            draw=lambda _: strip_html(seen, strips, _),
        ),
        "log": Part(key=list(records.recent), draw=lambda _: log_html(records.recent, _)),
        "settings": Part(key=history.run, draw=lambda _: _.markup(settings_html(history.run, _))),
        "files": Part(
            key=files, draw=lambda _: files_html(folder, _, exported=exported, best=best)
        ),
    }


def log_html(events: Sequence[Event], _: Words) -> Html:
    """Return the log as the run wrote it; whoever reads the pages in another language is told that it is English."""
    shown = _.markup(log(events))
    if _.code == ENGLISH:
        return shown
    return Html(tag("p", _("What the program has written, in English."), class_="quiet") + shown)


def shown_best(folder: Path, history: RunHistory) -> int:
    """Return the step that the chart marks as the best of those with a file, 0 for none."""
    take = recommended(exports(folder, history), losses(history), read_best(folder))
    return take.step if take is not None and take.is_found else 0


def damaged_parts(seen: Look, reason: str) -> Mapping[str, Part]:
    """Return the parts for a folder whose records cannot be read: why, and the buttons."""
    told = tag("p", reason, class_="notice error")
    names = ("take", "figures", "coach", "strip", "settings", "files")
    empty = {name: Part(key="", draw=lambda _: Html("")) for name in names}
    blank = {"drawn": "", "steps": 0}
    return {
        "head": Part(key=told, draw=lambda _: _.markup(told)),
        "buttons": Part(key=possible(seen), draw=lambda _: _buttons(seen)),
        "where": _where(seen),
        "film": Part(key="", draw=lambda _: {"frames": [], "prompt": "", "no_mp4": ""}),
        "samples": Part(key="", draw=lambda _: None),
        "chart": Part(key="", draw=lambda _: blank),
        "log": Part(key=told, draw=lambda _: _.markup(told)),
        **empty,
    }


def stamp(seen: Look) -> runs.Stamp:
    """Return a value that changes when any part may."""
    return (
        *runs.stamp(seen.folder, seen.status),
        runs.file_stamp(seen.folder / BEST_RECORD),
        seen.may_be_ended,
        seen.queued,
        int(seen.silent_s // 60),
    )


def _where(seen: Look) -> Part:
    """Return whether somebody has to say where the images of a run are before it can go on."""
    unknown = possible(seen).resume and command_lines.recorded_dataset(seen.folder) is None
    return Part(key=unknown, draw=lambda _: unknown)


def _chart(history: RunHistory, best: int, _: Words) -> dict[str, Any]:
    """Return the chart as it is at first, and whether there is one to look at more closely."""
    if not history.steps:
        said = tag("p", _("The curve of the loss begins with the first step."), class_="quiet")
        return {"drawn": said, "steps": 0}
    drawn = _.markup(loss_curve(history, LossView(best=best)))
    return {"drawn": drawn, "steps": history.steps[-1].step}


def _chart_key(history: RunHistory) -> tuple[object, ...]:
    """Return a key that changes about as often as a new step can be seen in the chart."""
    count = len(history.steps)
    stride = max(1, count // _REDRAWS)
    ended = None if history.end is None else history.end.kind
    return (stride, count // stride, len(history.validations), len(history.marks), ended)


def _buttons(seen: Look) -> list[str]:
    """Return the buttons that are of use."""
    return [button for button, is_of_use in asdict(possible(seen)).items() if is_of_use]


def sample_sheet(
    folder: Path,
    history: RunHistory,
    *,
    exported: Mapping[int, str],
    best: Best | None,
    _: Words,
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
        "ended": history.end is not None,
        "is_slider": strips_of(history.samples) is not None,
        "prompts": [{"text": spoken_prompt(prompt, _), "seed": seed} for prompt, seed in rows],
        "steps": [
            {
                "step": step,
                "name": _("step {#}", f"{step:,}") if step else _("base"),
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


def strip_html(seen: Look, strips: Strips | None, _: Words) -> Html:
    """Return the newest samples of a slider from less to more; nothing for any other run."""
    if strips is None:
        return Html("")
    signs = [
        f"{strength:+g}".replace("-", "\u2212") if strength else "0"
        for strength in strips.strengths
    ]
    return render(
        "run/strip.html",
        _,
        step=strips.step,
        is_going=seen.status.state == "running",
        strips=[
            (
                spoken_prompt(prompt, _),
                list(zip(signs, (_address(seen.folder, each) for each in images), strict=True)),
            )
            for (prompt, _seed), images in strips.rows.items()
        ],
    )


def _address(folder: Path, image: SampleImage | None) -> str | None:
    if image is None or not _IMAGE.fullmatch(image.file):
        return None
    try:
        version = (folder / image.file).stat().st_mtime_ns
    except OSError:
        return None
    return f"{run_url(folder.name, *image.file.split('/'))}?v={version:x}"


def files_html(folder: Path, _: Words, *, exported: Mapping[int, str], best: Best | None) -> Html:
    """Return the LoRA files with their download, the newest first, the best one on top."""
    marked = None if best is None else best.step
    rows = [
        _file(folder, exported[step], step=step, marked=marked) for step in sorted(exported)[::-1]
    ]
    return render(
        "run/files.html",
        _,
        run=folder.name,
        best=None if best is None else _file(folder, best.file, step=best.step, marked=None),
        files=rows,
        report=run_url(folder.name, REPORT) if (folder / REPORT).is_file() else "",
        samples=samples_url(folder.name) if (folder / "samples").is_dir() else "",
        folder=folder.resolve(),
    )


def _file(folder: Path, name: str, *, step: int, marked: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "url": run_url(folder.name, name),
        "step": step,
        "size_bytes": _size_bytes(folder / name),
        "is_marked": marked == step,
    }


def _size_bytes(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:  # pruned since it was listed
        return None
