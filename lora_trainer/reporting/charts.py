"""Line charts as inline SVG, and the HTML they stand in, where no text can become markup.

HTML and SVG in which text cannot become markup: every plain string is escaped where it enters.

Inputs: tag names of this package, texts and attribute values from anywhere. Output: `Html`, the
only kind of string that is inserted as it stands. Control characters and lone surrogates, which
no document may hold, become the replacement character, and so do the signs that turn the direction
of the words after them: a caption must not rearrange the sentence it stands in.

Line charts as inline SVG: axes with round ticks, marks, tooltips; no library, no script.

Inputs: points, labels, CSS classes (colours live in the report's style sheet). Output: `Html`, each
chart drawn twice, for a wide and a narrow window, so that its text keeps its size on a phone; the
style sheet shows one. Values that are not finite break a line instead of bending it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)
_VOID = frozenset({"br", "img", "input", "meta"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return `value` as text that is safe in an element and in a quoted attribute."""
    return (
        value
        if isinstance(value, Html)
        else Html(html.escape(_FORBIDDEN.sub("\ufffd", str(value))))
    )


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return `<name ...>children</name>`; None is left out, of children and of attributes.

    A trailing underscore of an attribute is dropped (`class_`), the others become hyphens.
    """
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attributes_text}>")
    return Html(f"<{name}{attributes_text}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Return the parts one after another, each escaped unless it is markup."""
    return Html("".join(text(part) for part in parts if part is not None))


def table(head: Iterable[str], rows: Iterable[Iterable[str | None]], *, class_: str = "") -> Html:
    """Return a table that scrolls sideways where it does not fit; a None cell is empty."""
    header = tag("tr", *(tag("th", cell, scope="col") if cell else tag("td") for cell in head))
    body = (tag("tr", *(tag("td", cell or "") for cell in row)) for row in rows)
    grid = tag("table", tag("thead", header), tag("tbody", *body), class_=class_ or None)
    return tag("div", grid, class_="scroll")


Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A polyline with its legend entry; `dots` gives each point a circle with `tooltip` of it."""

    label: str
    css: str
    points: Sequence[Point]
    dots: bool = False
    tooltip: Callable[[Point], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at `x`: a tick on the axis, or a rule over the whole height."""

    x: float
    css: str
    tooltip: str
    rule: bool = False


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A vertical band between two x that shows `tooltip` when pointed at."""

    start: float
    end: float
    tooltip: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The curves of a chart; `top` bounds the y axis: points above it are drawn at the edge.

    With `log` the y axis is logarithmic: values that are not positive break a line.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    levels: Sequence[ChartLine] = ()
    marks: Sequence[Mark] = ()
    strips: Sequence[Strip] = ()
    top: float | None = None
    from_zero: bool = True
    log: bool = False
    x_format: Format = "{:,.0f}".format
    y_format: Format | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """A drawing area in CSS pixels; the margins hold the tick labels."""

    width_px: int
    height_px: int
    css: str
    left_px: int = 52
    right_px: int = 10
    top_px: int = 22
    bottom_px: int = 38


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where data land in an SVG."""

    size: Size
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_range: Point
    y_range: Point
    log: bool = False

    def x(self, value: float) -> float:
        inner = self.size.width_px - self.size.left_px - self.size.right_px
        return self.size.left_px + inner * _fraction(value, self.x_range)

    def y(self, value: float) -> float:
        inner = self.size.height_px - self.size.top_px - self.size.bottom_px
        bounds = self.y_range
        if self.log:
            value, bounds = math.log10(value), (math.log10(bounds[0]), math.log10(bounds[1]))
        return self.size.height_px - self.size.bottom_px - inner * _fraction(value, bounds)


def _fraction(value: float, bounds: Point) -> float:
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def draw(chart: Chart, *, sizes: Sequence[Size]) -> Html:
    """Return a figure with legend and one SVG per size, or a sentence when nothing can be drawn."""
    if chart.log:
        chart = replace(chart, lines=[_positive(line) for line in chart.lines])
    if not any(True for line in chart.lines for run in finite_runs(line.points)):
        return tag("p", f"{chart.title}: nothing was recorded.", class_="quiet")
    legend = (
        tag("span", tag("i", class_=f"key {line.css}"), line.label)
        for line in (*chart.lines, *chart.levels)
        if line.label
    )
    caption = tag("figcaption", tag("b", chart.title), tag("span", *legend, class_="legend"))
    return tag("figure", caption, *(_svg(chart, size=size) for size in sizes), class_="chart")


def _positive(line: ChartLine) -> ChartLine:
    return replace(line, points=[(x, y if y > 0 else math.nan) for x, y in line.points])


def _svg(chart: Chart, *, size: Size) -> Html:
    axes = axes_of(chart, size=size)
    return tag(
        "svg",
        tag("title", f"{chart.title} by {chart.x_label}"),
        _grid(chart, axes),
        *(_strip(strip, axes) for strip in chart.strips),
        *(_level(level, axes) for level in chart.levels),
        *(_mark(mark, axes) for mark in chart.marks),
        *(_line(line, axes) for line in chart.lines),
        viewBox=f"0 0 {size.width_px} {size.height_px}",
        class_=size.css,
        role="img",
        # For a script that lets a stretch be chosen: where the x axis begins and ends, in pixels and in its unit.
        data_x_px=f"{size.left_px} {size.width_px - size.right_px}",
        data_x_range="{:.10g} {:.10g}".format(*axes.x_range),
    )


def axes_of(chart: Chart, *, size: Size) -> Axes:
    """Return axes that hold all finite points and levels, with round ticks that fit the size."""
    points = [
        point
        for line in (*chart.lines, *chart.levels)
        for run in finite_runs(line.points)
        for point in run
    ]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    if chart.top is not None and chart.top > low:
        high = min(high, chart.top)
    if chart.from_zero and low > 0 and not chart.log:
        low = 0.0
    x_range = (x_low, x_high) if x_high > x_low else (x_low - 1, x_high + 1)
    many = max(2, size.height_px // 55)
    y_ticks = log_ticks(low, high, count=many) if chart.log else round_ticks(low, high, count=many)
    x_ticks = round_ticks(*x_range, count=min(12, size.width_px // 60))
    return Axes(
        size=size,
        # Whole ones only: steps and timesteps are counts, and half a step would read as the next.
        x_ticks=tuple(
            tick for tick in x_ticks if x_range[0] <= tick <= x_range[1] and tick.is_integer()
        ),
        y_ticks=y_ticks,
        x_range=x_range,
        y_range=(y_ticks[0], y_ticks[-1]),
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
    """Return 1, 2 and 5 times powers of ten that enclose [low, high], powers alone if those are more than `count`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9)
    if 10.0**first > low:  # a value one rounding below a power of ten has that power's logarithm
        first -= 1
    if last - first >= count:
        return tuple(10.0**power for power in range(first, last + 1))
    ticks = [
        float(f"{m * 10.0**power:.10g}") for power in range(first, last + 1) for m in (1, 2, 5)
    ]
    below = max(index for index, tick in enumerate(ticks) if tick <= low)
    above = min(index for index, tick in enumerate(ticks) if tick >= high and index > below)
    return tuple(ticks[below : above + 1])


def tick_texts(ticks: Sequence[float], form: Format | None) -> list[str]:
    """Return the ticks as text, by default all with as many decimals as the longest needs."""
    if form is not None:
        return [form(tick) for tick in ticks]
    plain = [f"{tick:.10g}" for tick in ticks]
    if any("e" in words for words in plain):
        return plain
    decimals = max(len(words.partition(".")[2]) for words in plain)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def finite_runs(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the stretches of points between values that are not finite."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[0]) and math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def thinned(points: Sequence[Point], *, limit: int) -> Sequence[Point]:
    """Return about `limit` points, the lowest and highest of every stretch among them."""
    if len(points) <= limit:
        return points
    width = math.ceil(len(points) / (limit // 2))
    points_drawn: list[Point] = []
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        points_drawn.extend(sorted(ends))
    return points_drawn


def thinned_line(points: Sequence[Point], *, limit: int) -> list[Point]:
    """Return about `limit` points of a line and its gaps, for one that is drawn more than once."""
    if len(points) <= limit:
        return list(points)
    points_drawn: list[Point] = []
    for run in finite_runs(points):
        if points_drawn:
            points_drawn.append((run[0][0], math.nan))
        points_drawn += thinned(run, limit=max(2, limit * len(run) // len(points)))
    return points_drawn


def _grid(chart: Chart, axes: Axes) -> Html:
    size = axes.size
    bottom, right = size.height_px - size.bottom_px, size.width_px - size.right_px
    y_words = tick_texts(axes.y_ticks, chart.y_format)
    return tag(
        "g",
        *(_row(words, axes, y=axes.y(y)) for y, words in zip(axes.y_ticks, y_words, strict=True)),
        *(_column(chart.x_format(tick), axes, x=axes.x(tick)) for tick in axes.x_ticks),
        tag("line", x1=size.left_px, x2=right, y1=bottom, y2=bottom, class_="axis"),
        tag("text", chart.y_label, x=size.left_px - 7, y=12, class_="end"),
        tag("text", chart.x_label, x=right, y=size.height_px - 4, class_="end"),
    )


def _row(words: str, axes: Axes, *, y: float) -> Html:
    left, right = axes.size.left_px, axes.size.width_px - axes.size.right_px
    rule = tag("line", x1=left, x2=right, y1=_px(y), y2=_px(y), class_="rule")
    return join((rule, tag("text", words, x=left - 7, y=_px(y + 4), class_="end")))


def _column(words: str, axes: Axes, *, x: float) -> Html:
    bottom = axes.size.height_px - axes.size.bottom_px
    notch = tag("line", x1=_px(x), x2=_px(x), y1=bottom, y2=bottom + 4, class_="axis")
    return join((notch, tag("text", words, x=_px(x), y=bottom + 17, class_="middle")))


def _line(line: ChartLine, axes: Axes) -> Html:
    path = "".join(_path(run, axes) for run in finite_runs(line.points))
    dots = (
        (_dot(line, point, axes) for run in finite_runs(line.points) for point in run)
        if line.dots
        else ()
    )
    return join((tag("path", d=path, class_=f"line {line.css}"), *dots))


def _path(points: Sequence[Point], axes: Axes) -> str:
    at = [
        f"{_px(axes.x(x))} {_px(_inside(y, axes))}"
        for x, y in thinned(points, limit=axes.size.width_px)
    ]
    return f"M{at[0]}" + ("L" + " ".join(at[1:]) if len(at) > 1 else "h0.01")


def _inside(y: float, axes: Axes) -> float:
    return axes.y(max(min(y, axes.y_range[1]), axes.y_range[0]))


def _dot(line: ChartLine, point: Point, axes: Axes) -> Html:
    title = tag("title", line.tooltip(point)) if line.tooltip else None
    return tag(
        "circle",
        title,
        cx=_px(axes.x(point[0])),
        cy=_px(_inside(point[1], axes)),
        r=3.2,
        class_=line.css,
    )


def _level(level: ChartLine, axes: Axes) -> Html:
    y = level.points[0][1]
    title = tag("title", level.tooltip(level.points[0])) if level.tooltip else None
    left, right = axes.size.left_px, axes.size.width_px - axes.size.right_px
    return tag(
        "line",
        title,
        x1=left,
        x2=right,
        y1=_px(axes.y(y)),
        y2=_px(axes.y(y)),
        class_=f"line {level.css}",
    )


def _mark(mark: Mark, axes: Axes) -> Html:
    x, bottom = axes.x(mark.x), axes.size.height_px - axes.size.bottom_px
    title = tag("title", mark.tooltip)
    if mark.rule:
        return tag(
            "line",
            title,
            x1=_px(x),
            x2=_px(x),
            y1=axes.size.top_px,
            y2=bottom,
            class_=f"mark {mark.css}",
        )
    shape = f"M{_px(x)} {bottom - 7}l4.5 7h-9z"
    return tag("path", title, d=shape, class_=f"mark {mark.css}")


def _strip(strip: Strip, axes: Axes) -> Html:
    start, end = axes.x(strip.start), axes.x(strip.end)
    height = axes.size.height_px - axes.size.top_px - axes.size.bottom_px
    title = tag("title", strip.tooltip)
    return tag(
        "rect",
        title,
        x=_px(start),
        y=axes.size.top_px,
        width=_px(end - start),
        height=height,
        class_="strip",
    )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
