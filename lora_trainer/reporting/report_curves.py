"""The report's curves: loss and learning rate.

Input: a RunHistory. Output: `Html`. The charts themselves are drawn by charts.py; here is decided which values
they show, how the loss is smoothed, and the note on values that do not fit the axis.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lora_trainer.common.wording import bytes_text, loss_text
from lora_trainer.reporting.charts import (
    Chart,
    ChartLine,
    Html,
    Mark,
    axes_of,
    draw,
    join,
    positive,
    tag,
)
from lora_trainer.reporting.history import Row, RunHistory, StepRow, number
from lora_trainer.reporting.status import Smoothed

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
    averages, span_steps = smoothed_losses(history.steps, share=SMOOTHING[view.smoothing])
    both = zip(history.steps, averages, strict=True)
    in_view = [(row, average) for row, average in both if view.holds(row.step)]
    steps = [row for row, _ in in_view]
    raw = [(row.step, row.loss) for row in steps]
    lines = [ChartLine(label="training, each step", css="raw", points=raw)]
    if span_steps > 1:
        label = f"training, mean of about {span_steps} steps"
        means = [(row.step, average) for row, average in in_view]
        lines.append(ChartLine(label=label, css="train", points=means))
    lines += _validation_lines(history, steps, view)
    must_show = [loss for line in lines[1:] for _, loss in line.points]
    marks = [_mark(row) for row in history.marks if view.holds(row["step"])]
    if view.best and view.holds(view.best):
        tip = f"step {view.best:,}: the best of the saved steps"
        marks.append(Mark(x=view.best, css="best", tooltip=tip, rule=True))
    chart = Chart(
        title="Loss",
        height_px=330,
        lines=[positive(line) for line in lines] if view.log else lines,
        marks=marks,
        top=None if view.outliers else axis_top([row.loss for row in steps], must_show=must_show),
        log=view.log,
    )
    kinds = {mark.css for mark in chart.marks}
    legend = "; ".join(words for kind, words in _MARKS_LEGEND.items() if kind in kinds)
    if legend:
        legend = f"{legend[0].upper()}{legend[1:]}. Point at a sign for its figures."
    notes = filter(None, (legend.format(best=view.best), *_notes(chart, steps)))
    return join((draw(chart), *(tag("p", note, class_="note") for note in notes)))


def _validation_lines(
    history: RunHistory, steps: Sequence[StepRow], view: LossView
) -> Iterator[ChartLine]:
    """Yield the validation losses, and that of the base as a level over all steps."""
    points = [(row.step, row.loss) for row in history.validations if row.step]
    points = [point for point in points if view.holds(point[0])]
    if points:
        yield ChartLine(
            label="validation",
            css="validation",
            points=points,
            tooltip=lambda point: f"step {point[0]:,.0f}: validation loss {loss_text(point[1])}",
        )
    base = history.base_validation
    if base is not None and steps and math.isfinite(base.loss):
        yield ChartLine(
            label="validation of the base",
            css="base",
            points=[(row.step, base.loss) for row in (steps[0], steps[-1])],
            tooltip=lambda point: f"validation loss of the untouched base: {loss_text(point[1])}",
        )


def rate_curve(history: RunHistory) -> Html:
    """Return the chart of the learning rate."""
    points = [(row.step, row.lr) for row in history.steps]
    line = ChartLine(label="", css="train", points=points)
    return draw(Chart(title="Learning rate", height_px=210, lines=[line]))


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


def _mark(row: Row) -> Mark:
    kind = row["event"]
    if kind == "saved":
        names = " and ".join(str(row[key]) for key in ("export", "state") if row.get(key))
        size_bytes = row.get("bytes")
        size = bytes_text(size_bytes) if isinstance(size_bytes, int) else "size unknown"
        event = f"saved {names} ({size})"
    elif kind == "resumed":
        event = f"resumed, {row.get('exactness')}"
    else:
        event = "{key} {old} -> {new}: {reason}".format_map(defaultdict(lambda: None, row))
    return Mark(
        x=row["step"],
        css="memory" if is_recovery(row) else kind,
        tooltip=f"step {row['step']:,}: {event}",
        rule=kind != "saved",
    )


def is_recovery(row: Row) -> bool:
    """Whether an event is a change with which a run went on after it ran out of memory."""
    key = str(row.get("key"))
    if row["event"] != "change" or not key.startswith("memory."):
        return False
    grown = number(row, "new") > number(row, "old")
    return not (key == "memory.micro_batch" and grown)  # that is the way back


def _notes(chart: Chart, steps: Sequence[StepRow]) -> Iterator[str]:
    finite = [row for row in steps if math.isfinite(row.loss)]
    if len(finite) < len(steps):
        count = len(steps) - len(finite)
        yield f"Steps whose loss is not a number: {count}. The line is broken there."
    axes = axes_of(chart)
    above = [row for row in finite if axes is not None and row.loss > axes.y_ticks[-1]]
    if above:
        highest = max(above, key=lambda row: row.loss)
        where = f"the highest is {loss_text(highest.loss)} at step {highest.step:,}"
        yield f"Steps whose loss lies above the chart: {len(above)}; {where}."
