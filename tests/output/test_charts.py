"""The charts' arithmetic: round ticks, thinning, gaps, positions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_trainer.reporting.charts import (
    Chart,
    ChartLine,
    Mark,
    Size,
    Strip,
    axes_of,
    draw,
    finite_runs,
    log_ticks,
    round_ticks,
    thinned,
    thinned_line,
    tick_texts,
)

SIZE = Size(width_px=400, height_px=200, css="wide")
numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))


def chart(points: list[tuple[float, float]], *, top: float | None = None) -> Chart:
    line = ChartLine(label="a", css="train", points=points)
    return Chart(title="t", x_label="x", y_label="y", lines=[line], top=top)


@given(numbers, numbers, st.integers(2, 12))
def test_ticks_are_round_enclose_and_are_few(one: float, other: float, count: int) -> None:
    low, high = sorted((one, other))
    ticks = round_ticks(low, high, count=count)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - allowed) for allowed in (1, 2, 5, 10)) < 1e-6
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= count + 2


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e4), st.integers(2, 12))
@example(low=999999.9999999999, factor=1.0, count=2)
def test_logarithmic_ticks_enclose(low: float, factor: float, count: int) -> None:
    ticks = log_ticks(low, low * factor, count=count)
    assert len(ticks) >= 2 and list(ticks) == sorted(set(ticks))
    assert ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= low * factor * (1 - 1e-9)


def test_a_logarithmic_axis_gives_each_power_of_ten_the_same_height() -> None:
    points = [(1.0, 0.01), (2.0, 0.1), (3.0, 0.0), (4.0, 1.0)]
    axes = axes_of(replace(chart(points[:2] + points[3:]), log=True), size=SIZE)
    at = [axes.y(value) for value in (0.01, 0.1, 1.0)]
    assert at[0] - at[1] == pytest.approx(at[1] - at[2]) and at[0] > at[2]
    drawn = draw(replace(chart(points), log=True), sizes=[SIZE])
    assert drawn.count("M") == 2  # nothing is drawn through the zero


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 0.14, (0.0, 0.05, 0.1, 0.15)),
        (0.0, 2e-3, (0.0, 0.0005, 0.001, 0.0015, 0.002)),
        (1.0, 1.0, (0.5, 1.0, 1.5)),
        (0.0, 0.0, (-0.5, 0.0, 0.5)),
    ],
)
def test_ticks_of_known_ranges(low: float, high: float, expected: tuple[float, ...]) -> None:
    ticks = round_ticks(low, high, count=4)
    assert set(expected) <= set(ticks) or ticks == pytest.approx(expected)


def test_ticks_share_their_decimals() -> None:
    assert tick_texts((0.0, 0.05, 0.1), None) == ["0.00", "0.05", "0.10"]
    assert tick_texts((0.0, 50.0), None) == ["0", "50"]
    assert tick_texts((1.0,), lambda value: f"<{value}>") == ["<1.0>"]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 300])
def test_no_step_is_named_twice_below_a_chart(steps: int) -> None:
    size = Size(width_px=1040, height_px=330, css="wide")
    axes = axes_of(chart([(float(step), 0.1) for step in range(1, steps + 1)]), size=size)
    texts = tick_texts(axes.x_ticks, "{:,.0f}".format)
    assert len(texts) == len(set(texts)) >= min(steps, 3)


@given(st.lists(st.tuples(st.just(0.0), st.sampled_from([1.0, math.nan, math.inf, -math.inf]))))
def test_gaps_split_lines_and_lose_no_point(points: list[tuple[float, float]]) -> None:
    runs = list(finite_runs(points))
    assert all(runs) and all(math.isfinite(y) for run in runs for _, y in run)
    assert sum(map(len, runs)) == sum(1 for _, y in points if math.isfinite(y))


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_order_and_extremes(values: list[float], limit: int) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thinned(points, limit=limit)
    assert len(kept) <= max(limit + 2, 2) and list(kept) == sorted(kept)
    assert {min(values), max(values)} <= {y for _, y in kept}


def test_a_thinned_line_keeps_its_gaps_and_its_extremes() -> None:
    points = [(float(x), math.nan if x in (300, 301) else math.sin(x)) for x in range(1000)]
    points[700] = (700.0, 5.0)
    kept = thinned_line(points, limit=100)
    assert len(kept) < 110
    before, after = finite_runs(kept)
    assert before[-1][0] < 300 and after[0][0] > 301
    assert (700.0, 5.0) in after
    assert thinned_line(points[:50], limit=100) == points[:50]


def test_axis_starts_at_zero_and_spans_the_data() -> None:
    axes = axes_of(chart([(1, 0.4), (11, 0.9)]), size=SIZE)
    assert axes.y_range[0] == 0.0 and axes.y_range[1] >= 0.9
    assert axes.x(1) == SIZE.left_px and axes.x(11) == SIZE.width_px - SIZE.right_px
    assert axes.y(0.0) == SIZE.height_px - SIZE.bottom_px > axes.y(0.9) >= SIZE.top_px


def test_what_lies_above_the_top_stays_inside_the_picture() -> None:
    bounded = chart([(0, 0.1), (1, 80.0), (2, 0.1)], top=0.2)
    axes = axes_of(bounded, size=SIZE)
    assert axes.y_range[1] < 1
    assert f"{axes.x(1):.0f} {SIZE.top_px}" in draw(bounded, sizes=[SIZE])


@pytest.mark.parametrize("points", [[(5.0, 0.3)], [(5.0, 0.0)], [(5.0, 0.3), (5.0, 0.3)]])
def test_single_points_can_be_drawn(points: list[tuple[float, float]]) -> None:
    drawn = draw(chart(points), sizes=[SIZE])
    assert "<path" in drawn and "nan" not in drawn and "inf" not in drawn


@pytest.mark.parametrize("points", [[], [(1.0, math.nan)]])
def test_nothing_to_draw_is_said(points: list[tuple[float, float]]) -> None:
    assert draw(chart(points), sizes=[SIZE]) == '<p class="quiet">t: nothing was recorded.</p>'


def test_marks_levels_strips_and_dots_carry_their_words() -> None:
    full = Chart(
        title="t",
        x_label="x",
        y_label="y",
        lines=[
            ChartLine(
                label="<a>",
                css="v",
                points=[(0, 1), (4, 2)],
                dots=True,
                tooltip=lambda point: f"dot {point[0]:g} & {point[1]:g}",
            )
        ],
        levels=[ChartLine(label="level", css="base", points=[(0, 1.5)], tooltip=lambda _: "tip")],
        marks=[
            Mark(x=2, css="saved", tooltip="mark"),
            Mark(x=3, css="change", tooltip="rule", rule=True),
        ],
        strips=[Strip(start=0, end=1, tooltip="strip")],
    )
    drawn = draw(full, sizes=[SIZE, SIZE])
    assert drawn.count("<svg") == 2 and drawn.count("&lt;a&gt;") == 1
    for words in ("dot 0 &amp; 1", "dot 4 &amp; 2", "tip", "mark", "rule", "strip"):
        assert drawn.count(f"<title>{words}</title>") == 2
