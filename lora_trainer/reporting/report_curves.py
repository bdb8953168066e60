"""The report's curves: loss, learning rate, validation loss by timestep.

Input: a RunHistory. Output: `Html`. The charts themselves are drawn by charts.py; here is decided which values
they show, how the loss is smoothed, and the note on values that do not fit the axis.
"""

from __future__ import annotations

import math
import sys
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
    join,
    table,
    tag,
    thinned_line,
)
from lora_trainer.reporting.history import MarkRow, RunHistory, StepRow, ValidationRow, number
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


Smoothing = Literal["none", "some", "much"]
SMOOTHING: Mapping[Smoothing, float] = {"none": 0.0, "some": 1 / 20, "much": 1 / 5}
"""The share of all steps that the mean of the loss is taken over."""


@dataclass(frozen=True, kw_only=True)
class LossView:
    """How the loss chart is looked at: from step `first` to `last`, both included."""

    smoothing: Smoothing = "some"
    log: bool = False
    outliers: bool = False
    first: int = 0
    last: int = sys.maxsize

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
    return join(
        (
            draw(chart, sizes=LARGE),
            _marks_legend(history.marks),
            *(tag("p", note, class_="note") for note in _notes(chart, history.steps)),
        )
    )


def curves(history: RunHistory) -> Html:
    """Return the loss chart with its notes, and the two small charts beside each other."""
    return join(
        (
            loss_curve(history),
            _changes(history.marks),
            tag(
                "div",
                draw(_rate_chart(history.steps), sizes=SMALL),
                _by_timestep(history),
                class_="columns",
            ),
        )
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
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    values_shown = [value for value in must_show if math.isfinite(value)]
    if not finite:
        return None
    return max([finite[math.ceil(0.98 * len(finite)) - 1], *values_shown])


def _loss_chart(
    history: RunHistory, *, smoothed: Sequence[float], span_steps: int, view: LossView
) -> Chart:
    steps = history.steps
    later = [row for row in history.validations if row.step]
    validation: list[Point] = [(row.step, row.loss) for row in later]
    raw: list[Point] = [(row.step, row.loss) for row in steps]
    means: list[Point] = [(row.step, mean) for row, mean in zip(steps, smoothed, strict=True)]
    lines = [ChartLine(label="training, each step", css="raw", points=_seen(raw))]
    if span_steps > 1:
        label = f"training, mean of about {span_steps} steps"
        lines.append(ChartLine(label=label, css="train", points=_seen(means)))
    if validation:
        lines.append(
            ChartLine(
                label="validation",
                css="validation",
                points=validation,
                dots=True,
                tooltip=_validation_tip,
            )
        )
    levels = _base_level(history)
    means_shown = smoothed if span_steps > 1 else ()
    must_show = [
        *means_shown,
        *(row.loss for row in later),
        *(line.points[0][1] for line in levels),
    ]
    return Chart(
        title="Loss",
        x_label="step",
        y_label="loss",
        lines=lines,
        levels=levels,
        marks=[_mark(mark) for mark in history.marks],
        strips=_strips(steps, smoothed),
        top=None if view.outliers else axis_top([row.loss for row in steps], must_show=must_show),
        log=view.log,
    )


def _seen(points: Sequence[Point]) -> list[Point]:
    """Return the points that can be told apart at the largest size; they are drawn at two, each with its axes."""
    return thinned_line(points, limit=LARGE[0].width_px)


def _validation_tip(point: Point) -> str:
    return f"step {point[0]:,.0f}: validation loss {loss_text(point[1])}"


def _base_level(history: RunHistory) -> list[ChartLine]:
    base = history.base_validation
    if base is None or not history.steps or not math.isfinite(base.loss):
        return []
    tip = f"validation loss of the untouched base: {loss_text(base.loss)}"
    first = float(history.steps[0].step)
    return [
        ChartLine(
            label="validation of the base",
            css="base",
            points=[(first, base.loss)],
            tooltip=lambda _: tip,
        )
    ]


def _strips(steps: Sequence[StepRow], smoothed: Sequence[float]) -> list[Strip]:
    if len(steps) < 2:
        return []
    stride = math.ceil(len(steps) / _MAX_STRIPS)
    chosen = [*range(0, len(steps), stride)]
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
        return Mark(
            x=mark.step, css="saved", tooltip=f"step {mark.step:,}: saved {names} ({_size(mark)})"
        )
    if mark.kind == "resumed":
        tip = f"step {mark.step:,}: resumed, {fields.get('exactness')}"
        return Mark(x=mark.step, css="resumed", tooltip=tip, rule=True)
    return Mark(
        x=mark.step,
        css="memory" if is_recovery(mark) else "change",
        tooltip=f"step {mark.step:,}: {change_text(mark)}",
        rule=True,
    )


def is_recovery(mark: MarkRow) -> bool:
    """Whether a mark is a change with which a run went on after it ran out of memory."""
    key = str(mark.fields.get("key"))
    if mark.kind != "change" or not key.startswith("memory."):
        return False
    grown = number(mark.fields, "new") > number(mark.fields, "old")
    return not (key == "memory.micro_batch" and grown)  # that is the way back


def _size(mark: MarkRow) -> str:
    size_bytes = mark.fields.get("bytes")
    return bytes_text(size_bytes) if isinstance(size_bytes, int) else "size unknown"


def change_text(mark: MarkRow) -> str:
    """Return `memory.micro_batch 8 -> 4: out of memory`."""
    fields = mark.fields
    return f"{fields.get('key')} {fields.get('old')} -> {fields.get('new')}: {fields.get('reason')}"


def _marks_legend(marks: Sequence[MarkRow]) -> Html | None:
    kinds = {"memory" if is_recovery(mark) else mark.kind for mark in marks}
    words = {
        "saved": "triangles: saves",
        "memory": "dashed rules: recovered from out of memory",
        "change": "dotted rules: changed settings",
        "resumed": "green rules: resumes",
    }
    legend = "; ".join(word for kind, word in words.items() if kind in kinds)
    return (
        tag(
            "p",
            f"{legend[:1].upper()}{legend[1:]}. Point at anything for its figures.",
            class_="note",
        )
        if legend
        else None
    )


def _notes(chart: Chart, steps: Sequence[StepRow]) -> Iterator[str]:
    finite = [row for row in steps if math.isfinite(row.loss)]
    if len(finite) < len(steps):
        count = len(steps) - len(finite)
        yield f"Steps whose loss is not a number: {count}. The line is broken there."
    top = axes_of(chart, size=LARGE[0]).y_range[1] if finite else math.inf
    above = [row for row in finite if row.loss > top]
    if above:
        highest = max(above, key=lambda row: row.loss)
        where = f"the highest is {loss_text(highest.loss)} at step {highest.step:,}"
        yield f"Steps whose loss lies above the chart: {len(above)}; {where}."


def _changes(marks: Sequence[MarkRow]) -> Html | None:
    rows = [
        (f"{mark.step:,}", _what(mark), str(mark.fields.get("reason") or _differences(mark)))
        for mark in marks
        if mark.kind != "saved"
    ]
    if not rows:
        return None
    return join(
        (
            tag("h3", "Changed on the way"),
            table(("step", "what", "why"), rows, class_="records facts"),
        )
    )


def _what(mark: MarkRow) -> Html:
    fields = mark.fields
    if mark.kind == "resumed":
        return tag("span", f"resumed, {fields.get('exactness')}")
    return tag(
        "span",
        tag("code", str(fields.get("key"))),
        f" {fields.get('old')} \u2192 {fields.get('new')}",
    )


def _differences(mark: MarkRow) -> str:
    differences = mark.fields.get("differences")
    return "; ".join(map(str, differences)) if isinstance(differences, list) else ""


def _rate_chart(steps: Sequence[StepRow]) -> Chart:
    return Chart(
        title="Learning rate",
        x_label="step",
        y_label="",
        lines=[ChartLine(label="", css="train", points=[(row.step, row.lr) for row in steps])],
        y_format=rate_text,
    )


def _by_timestep(history: RunHistory) -> Html:
    base, last = history.base_validation, history.last_validation
    rows = [
        (row, name, css)
        for row, name, css in ((base, "base", "base"), (last, "", "validation"))
        if row is not None
    ]
    lines = [
        _timestep_line(row, name=name or f"step {row.step:,}", css=css) for row, name, css in rows
    ]
    if not any(line.points for line in lines):
        return tag("p", "Validation loss by timestep: nothing was validated.", class_="quiet")
    title, noise = "Validation loss by timestep", "timestep (0 clean, high noisy)"
    return draw(Chart(title=title, x_label=noise, y_label="loss", lines=lines), sizes=SMALL)


def _timestep_line(row: ValidationRow, *, name: str, css: str) -> ChartLine:
    def tip(point: Point) -> str:
        return f"timestep {point[0]:.0f}, {name}: {loss_text(point[1])}"

    return ChartLine(label=name, css=css, points=sorted(row.by_timestep), dots=True, tooltip=tip)
