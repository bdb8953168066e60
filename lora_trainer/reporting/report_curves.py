"""The report's curves: loss, learning rate, validation loss by timestep.

Input: a RunHistory. Output: `Html`. The charts themselves are drawn by charts.py; here is decided which values
they show, how the loss is smoothed, and the note on values that do not fit the axis.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from lora_trainer.common.wording import bytes_text, loss_text, rate_text
from lora_trainer.reporting.charts import (
    Chart,
    ChartLine,
    Html,
    Mark,
    Point,
    Size,
    Strip,
    axes_of,
    draw,
    is_drawable,
    join,
    positive,
    tag,
)
from lora_trainer.reporting.history import MarkRow, RunHistory, StepRow, number
from lora_trainer.reporting.status import Smoothed

LARGE = (
    Size(width_px=1040, height_px=330, css="wide"),
    Size(width_px=368, height_px=260, css="narrow"),
)
SMALL = (
    Size(width_px=500, height_px=210, css="wide"),
    Size(width_px=368, height_px=210, css="narrow"),
)
_MAX_STRIPS = 120
_MARKS_LEGEND = {
    "saved": "triangles: saves",
    "best": "solid green rule: step {best:,}, the best of the saved steps",
    "memory": "dashed rules: recovered from out of memory",
    "change": "dotted rules: changed settings",
    "resumed": "green rules: resumes",
}


Smoothing = Literal["none", "some", "much"]
SMOOTHING: Mapping[Smoothing, float] = {"none": 0.0, "some": 1 / 20, "much": 1 / 5}
"""The share of all steps that the mean of the loss is taken over."""


@dataclass(frozen=True, kw_only=True)
class LossView:
    """How the loss chart is looked at: from step `first` to `last`, both included; `best` is marked, 0: none."""

    smoothing: Smoothing = "some"
    log: bool = False
    outliers: bool = False
    first: int = 0
    last: int = sys.maxsize
    best: int = 0

    def holds(self, step: int) -> bool:
        return self.first <= step <= self.last


WHOLE = LossView()


def loss_curve(history: RunHistory, view: LossView = WHOLE) -> Html:
    """Return the loss chart with its legend and notes."""
    smoothed, span_steps = smoothed_losses(history.steps, share=SMOOTHING[view.smoothing])
    chosen = [index for index, row in enumerate(history.steps) if view.holds(row.step)]
    smoothed = [smoothed[index] for index in chosen]
    history = replace(
        history,
        steps=tuple(history.steps[index] for index in chosen),
        # The base's validation, at step 0, is a level over the whole width.
        validations=tuple(
            row for row in history.validations if view.holds(row.step) or not row.step
        ),
        marks=tuple(mark for mark in history.marks if view.holds(mark.step)),
    )
    chart = _loss_chart(history, smoothed=smoothed, span_steps=span_steps, view=view)
    kinds = {mark.css for mark in chart.marks}
    words = (words for kind, words in _MARKS_LEGEND.items() if kind in kinds)
    legend = "; ".join(words).format(best=view.best)
    if legend:
        legend = f"{legend[0].upper()}{legend[1:]}. Point at anything for its figures."
    notes = filter(None, (legend, *_notes(chart, history.steps)))
    return join((draw(chart, sizes=LARGE), *(tag("p", note, class_="note") for note in notes)))


def small_curves(history: RunHistory) -> Html:
    """Return the charts of the learning rate and of the validation loss by timestep."""
    rates = [(row.step, row.lr) for row in history.steps]
    rate = Chart(
        title="Learning rate",
        x_label="step",
        y_label="",
        lines=[ChartLine(label="", css="train", points=rates)],
        y_format=rate_text,
    )
    base, last = history.base_validation, history.last_validation
    lines = [
        _timestep_line(row.by_timestep, name=name, css=css)
        for row, name, css in (
            (base, "base", "base"),
            (last, f"step {last.step:,}" if last else "", "validation"),
        )
        if row is not None
    ]
    title = "Validation loss by timestep"
    noise = "timestep (0 clean, high noisy)"
    by_timestep = Chart(title=title, x_label=noise, y_label="loss", lines=lines)
    return join(
        (
            draw(rate, sizes=SMALL),
            draw(by_timestep, sizes=SMALL)
            if any(line.points for line in lines)
            else tag("p", f"{title}: nothing was validated.", class_="quiet"),
        )
    )


def _timestep_line(points: Sequence[Point], *, name: str, css: str) -> ChartLine:
    return ChartLine(
        label=name,
        css=css,
        points=sorted(points),
        dots=True,
        tooltip=lambda point: f"timestep {point[0]:.0f}, {name}: {loss_text(point[1])}",
    )


def smoothed_losses(
    steps: Sequence[StepRow], *, share: float = SMOOTHING["some"]
) -> tuple[list[float], int]:
    """Return the smoothed loss after each step, and over about how many steps it averages; share 0: over one."""
    if not share:
        return [row.loss for row in steps], 1
    span_steps = max(5, round(len(steps) * share))
    average = Smoothed(span_steps=span_steps)
    return [average.add(row.loss) for row in steps], span_steps


def axis_top(losses: Sequence[float], *, must_show: Sequence[float]) -> float | None:
    """Return where the loss axis may end: everything that must show, and 98 % of the raw losses."""
    finite = sorted(filter(math.isfinite, losses))
    if not finite:
        return None
    return max([finite[math.ceil(0.98 * len(finite)) - 1], *filter(math.isfinite, must_show)])


def _loss_chart(
    history: RunHistory, *, smoothed: Sequence[float], span_steps: int, view: LossView
) -> Chart:
    steps, base = history.steps, history.base_validation
    losses = [row.loss for row in steps]
    validation = [(float(row.step), row.loss) for row in history.validations if row.step]
    lines = [ChartLine(label="training, each step", css="raw", points=_by_step(steps, losses))]
    must_show = [loss for _, loss in validation]
    if span_steps > 1:
        label = f"training, mean of about {span_steps} steps"
        lines.append(ChartLine(label=label, css="train", points=_by_step(steps, smoothed)))
        must_show += smoothed
    if validation:
        lines.append(
            ChartLine(
                label="validation",
                css="validation",
                points=validation,
                dots=True,
                tooltip=lambda point: (
                    f"step {point[0]:,.0f}: validation loss {loss_text(point[1])}"
                ),
            )
        )
    levels = []
    if base is not None and steps and math.isfinite(base.loss):
        tip = f"validation loss of the untouched base: {loss_text(base.loss)}"
        level = [(float(steps[0].step), base.loss)]
        label = "validation of the base"
        levels.append(ChartLine(label=label, css="base", points=level, tooltip=lambda _: tip))
        must_show.append(base.loss)
    return Chart(
        title="Loss",
        x_label="step",
        y_label="loss",
        lines=[positive(line) for line in lines] if view.log else lines,
        levels=levels,
        marks=[*map(_mark, history.marks), *_best_mark(view)],
        strips=_strips(steps, smoothed),
        top=None if view.outliers else axis_top(losses, must_show=must_show),
        log=view.log,
    )


def _by_step(steps: Sequence[StepRow], values: Sequence[float]) -> list[Point]:
    return [(float(row.step), value) for row, value in zip(steps, values, strict=True)]


def _strips(steps: Sequence[StepRow], smoothed: Sequence[float]) -> list[Strip]:
    if len(steps) < 2:
        return []
    chosen = range(0, len(steps), math.ceil(len(steps) / _MAX_STRIPS))
    middles = [(steps[a].step + steps[b].step) / 2 for a, b in pairwise(chosen)]
    edges = [steps[0].step, *middles, steps[-1].step]
    return [
        Strip(start=start, end=end, tooltip=_strip_tip(steps[index], smoothed[index]))
        for index, (start, end) in zip(chosen, pairwise(edges), strict=True)
        if end > start
    ]


def _strip_tip(row: StepRow, smoothed: float) -> str:
    return (
        f"step {row.step:,}: loss {loss_text(row.loss)}, smoothed {loss_text(smoothed)}, "
        f"learning rate {rate_text(row.lr)}"
    )


def _mark(mark: MarkRow) -> Mark:
    fields = mark.fields
    if mark.kind == "saved":
        names = " and ".join(str(fields[key]) for key in ("export", "state") if fields.get(key))
        size_bytes = fields.get("bytes")
        size = bytes_text(size_bytes) if isinstance(size_bytes, int) else "size unknown"
        event = f"saved {names} ({size})"
    elif mark.kind == "resumed":
        event = f"resumed, {fields.get('exactness')}"
    else:
        event = "{key} {old} -> {new}: {reason}".format_map(defaultdict(lambda: None, fields))
    return Mark(
        x=mark.step,
        css="memory" if is_recovery(mark) else mark.kind,
        tooltip=f"step {mark.step:,}: {event}",
        rule=mark.kind != "saved",
    )


def _best_mark(view: LossView) -> list[Mark]:
    if not view.best or not view.holds(view.best):
        return []
    tip = f"step {view.best:,}: the best of the saved steps"
    return [Mark(x=view.best, css="best", tooltip=tip, rule=True)]


def is_recovery(mark: MarkRow) -> bool:
    """Whether a mark is a change with which a run went on after it ran out of memory."""
    key = str(mark.fields.get("key"))
    if mark.kind != "change" or not key.startswith("memory."):
        return False
    grown = number(mark.fields, "new") > number(mark.fields, "old")
    return not (key == "memory.micro_batch" and grown)  # that is the way back


def _notes(chart: Chart, steps: Sequence[StepRow]) -> Iterator[str]:
    finite = [row for row in steps if math.isfinite(row.loss)]
    if len(finite) < len(steps):
        count = len(steps) - len(finite)
        yield f"Steps whose loss is not a number: {count}. The line is broken there."
    top = axes_of(chart, size=LARGE[0]).y_range[1] if is_drawable(chart) else math.inf
    above = [row for row in finite if row.loss > top]
    if above:
        highest = max(above, key=lambda row: row.loss)
        where = f"the highest is {loss_text(highest.loss)} at step {highest.step:,}"
        yield f"Steps whose loss lies above the chart: {len(above)}; {where}."
