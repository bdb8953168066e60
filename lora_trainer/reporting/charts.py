"""Line charts as inline SVG, and the HTML they stand in, where no text can become markup.

Inputs: texts from anywhere; points, labels and CSS classes of a chart. Output: `Html`, the only kind of string that
is inserted as it stands, from a template beside this file: every plain string is escaped where it enters. Control
characters and lone surrogates, which no document may hold, become the replacement character, and so do the signs that
turn the direction of the words after them: a caption must not rearrange the sentence it stands in.

A chart has axes with round ticks, marks and tooltips; no library, no script. It is drawn twice, for a wide and
a narrow window, so that its text keeps its size on a phone; the style sheet (charts.css) shows one. Values that are
not finite break a line instead of bending it. The charts are those of a run's loss, on the page of the run and in
its report, and of its learning rate.
"""

from __future__ import annotations

import html
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lora_trainer.common.event_kinds import Resumed, Saved, Step
from lora_trainer.common.wording import bytes_text, loss_text
from lora_trainer.planning.timesteps import shares_sentence
from lora_trainer.reporting.history import Mark, RunHistory, is_recovery
from lora_trainer.reporting.status import Smoothed

_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


class Html(str):
    """Text that is markup already."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def text(value: object) -> Html:
    """Return `value` as text that is safe in an element and in a quoted attribute."""
    if hasattr(value, "__html__"):  # the protocol of jinja2 and its kind for markup
        return Html(value)
    return Html(html.escape(_FORBIDDEN.sub("\ufffd", str(value))))


Point = tuple[float, float]
# The style sheet of charts, for any page that has its colours.
CHARTS_CSS = Path(__file__).with_name("charts.css")
# The margins of a chart, which hold the tick labels.
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 52, 10, 22, 38
# The drawings of a chart by the class that shows them: in a wide and in a narrow window.
WIDTHS_PX = {"wide": 1040, "narrow": 368}


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A polyline with its legend entry."""

    label: str
    css: str
    """Its class, by which chart.html describes its points."""
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """A line at the step at which something happened."""

    step: int
    css: str
    """Its class: the kind of event, `memory` for a recovery after running out of it, `best`."""
    words: str
    """What its tooltip says."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The curves of a chart by step."""

    title: str
    height_px: int
    lines: Sequence[ChartLine]
    marks: Sequence[ChartMark] = ()
    top: float | None = None
    """Upper bound of the y axis; points above it are drawn at the edge."""
    log: bool = False
    """A logarithmic y axis, for positive lines. Otherwise the axis starts at zero or below."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where data are in an SVG of a given size."""

    width_px: int
    height_px: int
    right: int
    """Where the right margin begins."""
    bottom: int
    """Where the bottom margin begins."""
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_range: Point
    log: bool = False

    left, top = LEFT_PX, TOP_PX

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Return the height of a value in pixels from the top; one outside of the range is at the edge."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        value = max(min(value, high), low)
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def path(self, points: Sequence[Point]) -> str:
        """Return the path of a line, thinned to about as many points as there are pixels, with its gaps."""
        path = ""
        for run in finite_runs(points):
            if len(run) > self.width_px:  # the lowest and the highest of every stretch are drawn
                count = math.ceil(len(run) / (self.width_px // 2))
                stretches = (run[start : start + count] for start in range(0, len(run), count))
                ends = (
                    {min(each, key=itemgetter(1)), max(each, key=itemgetter(1))}
                    for each in stretches
                )
                run = [point for pair in ends for point in sorted(pair)]
            first, *rest = [f"{pixels(self.x(x))} {pixels(self.y(y))}" for x, y in run]
            path += f"M{first}" + ("L" + " ".join(rest) if rest else "h0.01")
        return path


def draw(chart: Chart, *, steps: Sequence[Step] = ()) -> Html:
    """Return a figure with legend and one SVG per width, or a sentence when nothing can be drawn.

    Below it are notes: a key to the marks, and which of the `steps` it does not show.
    """
    drawings = {css: axes_of(chart, width_px=width_px) for css, width_px in WIDTHS_PX.items()}
    finite = [row for row in steps if math.isfinite(row.loss)]
    top = drawings["wide"].y_ticks[-1] if drawings["wide"] else math.inf
    above = [row for row in finite if row.loss > top]
    broken = len(steps) - len(finite)
    return render("chart.html", chart=chart, drawings=drawings, broken=broken, above=above)


def axes_of(chart: Chart, *, width_px: int) -> Axes | None:
    """Return axes that hold all finite points, with round ticks that fit the size; None without a point."""
    points = [point for line in chart.lines for run in finite_runs(line.points) for point in run]
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    x_low, x_high, low, high = min(xs), max(xs), min(ys), max(ys)
    if chart.top is not None and chart.top > low:
        high = min(high, chart.top)
    count = max(2, chart.height_px // 55)
    x_range = (x_low, x_high) if x_high > x_low else (x_low - 1, x_high + 1)
    x_ticks = round_ticks(*x_range, count=min(12, width_px // 60))
    return Axes(
        width_px=width_px,
        height_px=chart.height_px,
        right=width_px - RIGHT_PX,
        bottom=chart.height_px - BOTTOM_PX,
        # Whole ones only: half a step would read as the next.
        x_ticks=[
            tick for tick in x_ticks if x_range[0] <= tick <= x_range[1] and tick.is_integer()
        ],
        y_ticks=log_ticks(low, high, count=count)
        if chart.log
        else round_ticks(min(low, 0.0), high, count=count),
        x_range=x_range,
        log=chart.log,
    )


def round_ticks(low: float, high: float, *, count: int) -> tuple[float, ...]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    span = high - low
    if not span > abs(high) * 1e-9:
        span = abs(high) or 1.0
        low, high = high - span / 2, high + span / 2
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(
        factor * power for factor in (1, 2, 5, 10) if factor * power * count >= span * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{index * step:.10g}") for index in range(first, last + 1))


def log_ticks(low: float, high: float, *, count: int) -> tuple[float, ...]:
    """Return 1, 2 and 5 times powers of ten that enclose [low, high], powers alone over `count` of them or more."""
    # One power more at each end: a value one rounding below a power of ten has that power's logarithm.
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1,) if math.log10(high / low) >= count - 1 else (1, 2, 5)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    below = max(tick for tick in ticks if tick <= low)
    above = min(tick for tick in ticks if tick >= high and tick > below)
    return tuple(tick for tick in ticks if below <= tick <= above)


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the ticks as text, all with as many decimals as the longest needs."""
    plain = [f"{tick:.10g}" for tick in ticks]
    if any("e" in words for words in plain):
        return plain
    decimals = max(len(words.partition(".")[2]) for words in plain)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def finite_runs(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the stretches of points between values that are not finite."""
    for is_finite, run in groupby(points, key=lambda point: all(map(math.isfinite, point))):
        if is_finite:
            yield list(run)


def pixels(value: float) -> str:
    """Return a place or length in pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=lambda value: "" if value is None else text(value),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "px": pixels,
    "tick_texts": tick_texts,
    "finite": lambda points: chain.from_iterable(finite_runs(points)),
    "loss": loss_text,
    "size": bytes_text,
}
TEMPLATES.tests["finite"] = math.isfinite


def render(template: str, **values: Any) -> Html:
    """Return a template of this folder filled in, every text in it escaped as `text` does."""
    return Html(TEMPLATES.get_template(template).render(values))


# ---- the loss and the learning rate of a run

Smoothing = Literal["none", "some", "much"]
# The share of all steps that the mean of the loss is taken over.
SMOOTHING: Mapping[Smoothing, float] = {"none": 0.0, "some": 1 / 20, "much": 1 / 5}


@dataclass(frozen=True, kw_only=True)
class LossView:
    """How the loss chart is shown."""

    smoothing: Smoothing = "some"
    log: bool = False
    outliers: bool = False
    first: int = 0
    """First step, included."""
    last: int = sys.maxsize
    """Last step, included."""
    best: int = 0
    """The step that is marked; 0: none."""

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
    validations = [(row.step, row.loss) for row in history.validations if row.step]
    if validations := [point for point in validations if view.holds(point[0])]:
        lines.append(ChartLine(label="validation", css="validation", points=validations))
    base = history.base_validation
    if base is not None and steps and math.isfinite(base.loss):  # as a level over all steps
        level = [(row.step, base.loss) for row in (steps[0], steps[-1])]
        lines.append(ChartLine(label="validation of the base", css="base", points=level))
    top, finite = None, sorted(loss for _, loss in raw if math.isfinite(loss))
    if finite and not view.outliers:  # all that must show, and 98 % of the raw losses
        must_show = (loss for line in lines[1:] for _, loss in line.points if math.isfinite(loss))
        top = max([finite[math.ceil(0.98 * len(finite)) - 1], *must_show])
    if view.log:  # a line breaks where it is not positive
        lines = [
            replace(line, points=[(x, y if y > 0 else math.nan) for x, y in line.points])
            for line in lines
        ]
    marks = [_chart_mark(mark) for mark in history.marks if view.holds(mark.step)]
    if view.best and view.holds(view.best):
        words = "the best of the saved steps"
        marks.append(ChartMark(step=view.best, css="best", words=words))
    chart = Chart(title="Loss", height_px=330, lines=lines, marks=marks, top=top, log=view.log)
    return draw(chart, steps=steps)


def _chart_mark(mark: Mark) -> ChartMark:
    match mark.event:
        case Saved() as saved:
            names = " and ".join(filter(None, (saved.export, saved.state)))
            css, words = saved.kind, f"saved {names} ({bytes_text(saved.bytes)})"
        case Resumed() as resumed:
            css, words = resumed.kind, f"resumed, {resumed.exactness}"
        case change:
            css = "memory" if is_recovery(mark) else change.kind
            words = f"{change.key} {change.old} -> {change.new}: {change.reason}"
    return ChartMark(step=mark.step, css=css, words=words)


def timestep_bars(shares: Sequence[float]) -> Html:
    """Return the shares of timesteps from 0 (no noise) to 1000 as bars; nothing where they are not known."""
    if not shares or not all(math.isfinite(share) for share in shares) or max(shares) <= 0:
        return Html("")
    most, width = max(shares), 1000 / len(shares)
    bars = "".join(
        f'<rect x="{number * width + 2:.0f}" y="{100 * (1 - share / most):.1f}" width="{width - 4:.0f}" '
        f'height="{100 * share / most:.1f}"><title>{number * width:.0f} to {(number + 1) * width:.0f}: '
        f"{share:.1%}</title></rect>"
        for number, share in enumerate(shares)
    )
    return Html(
        f'<svg class="timesteps" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{shares_sentence(shares)}">{bars}</svg>'
    )


def rate_curve(history: RunHistory) -> Html:
    """Return the chart of the learning rate."""
    points = [(row.step, row.lr) for row in history.steps]
    line = ChartLine(label="", css="train", points=points)
    return draw(Chart(title="Learning rate", height_px=210, lines=[line]))


def smoothed_losses(
    steps: Sequence[Step], *, share: float = SMOOTHING["some"]
) -> tuple[list[float], int]:
    """Return the smoothed loss after each step, and over about how many steps it averages; share 0: over one."""
    if not share:
        return [row.loss for row in steps], 1
    span_steps = max(5, round(len(steps) * share))
    average = Smoothed(span_steps=span_steps)
    return [average.add(row.loss) for row in steps], span_steps
