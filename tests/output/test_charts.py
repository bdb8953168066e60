"""The loss chart as it is drawn: round ticks, thinning, gaps, positions, words on everything."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_trainer.reporting import charts as curves
from lora_trainer.reporting.history import read_history
from tests.fakes.run_folder import fake_run

RAW = curves.LossView(smoothing="none", outliers=True)
LOG = curves.LossView(smoothing="none", outliers=True, log=True)
WIDTH_PX, HEIGHT_PX, LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 1040, 330, 52, 1030, 22, 292
numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))


@dataclass
class Drawn:
    """A chart in its wide window: the texts of its ticks with their places in pixels, and its raw line."""

    svg: str
    rest: str

    def ticks(self, css: str, axis: str) -> dict[str, float]:
        pattern = rf'<text [^>]*\b{axis}="([\d.]+)"[^>]* class="{css}">([^<]*)<'
        texts = {text: float(place) for place, text in re.findall(pattern, self.svg)}
        return {text: place for text, place in texts.items() if text != "step"}

    @property
    def y(self) -> dict[float, float]:
        """Places of the y axis by value; a text stands 4 px below its rule."""
        return {float(text): place - 4 for text, place in self.ticks("end", "y").items()}

    @property
    def path(self) -> str:
        return re.findall(r'<path d="([^"]*)" class="line raw">', self.svg)[0]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", self.path)]


def drawn(losses: Sequence[float | None], view: curves.LossView = RAW) -> Drawn:
    rows = [{"event": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    with TemporaryDirectory() as name:
        (Path(name) / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        svg, _, rest = curves.loss_curve(read_history(Path(name)), view).partition("</svg>")
    return Drawn(svg, rest)


@given(numbers, numbers)
@example(one=0.0, other=0.0)
@example(one=0.1, other=1e5)
def test_ticks_are_round_enclose_and_are_few(one: float, other: float) -> None:
    places = drawn([one, other]).y
    ticks = sorted(places)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - allowed) for allowed in (1, 2, 5, 10)) < 1e-6
    slack = 1e-6 * max(1.0, abs(one), abs(other))
    assert ticks[0] <= min(one, other, 0) + slack and ticks[-1] >= max(one, other) - slack
    assert 2 <= len(ticks) <= HEIGHT_PX // 55 + 2
    assert (places[ticks[0]], places[ticks[-1]]) == (BOTTOM_PX, TOP_PX)


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e4))
@example(low=999999.9999999999, factor=1.0)
def test_logarithmic_ticks_enclose(low: float, factor: float) -> None:
    ticks = list(drawn([low, low * factor], LOG).y)
    assert len(ticks) >= 2 and ticks == sorted(set(ticks))
    assert ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= low * factor * (1 - 1e-9)


def test_a_logarithmic_axis_gives_each_power_of_ten_the_same_height() -> None:
    chart = drawn([0.01, 0.1, 0.0, 1.0], LOG)
    at = [y for _, y in chart.points]
    assert at[0] - at[1] == pytest.approx(at[1] - at[2], abs=0.2) and at[0] > at[2]
    assert list(drawn([0.02, 0.05], LOG).y) == [0.02, 0.05]
    assert chart.path.count("M") == 2  # nothing is drawn through the zero
    assert drawn([0.0, -1.0], LOG).svg.startswith(
        '<p class="quiet">Loss: nothing was recorded.</p>'
    )


def test_ticks_share_their_decimals() -> None:
    texts = list(drawn([0.0, 0.1]).ticks("end", "y"))
    assert texts == ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]
    assert list(drawn([0.0, 140.0]).ticks("end", "y")) == ["0", "50", "100", "150"]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 300, 2000])
def test_no_step_is_named_twice_below_a_chart(steps: int) -> None:
    texts = re.findall(r'class="middle">([\d,]+)<', drawn([0.1] * steps).svg)
    assert len(texts) == len(set(texts)) >= min(steps, 3)
    assert steps < 2000 or texts[-1] == "2,000"


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1041, 3000))
def test_a_line_of_more_points_than_pixels_keeps_its_order_and_extremes(
    seed: int, count: int
) -> None:
    draw_number = random.Random(seed).gauss
    values = [draw_number(0, 1) for _ in range(count)]
    chart = drawn(values)
    xs, ys = zip(*chart.points, strict=True)
    assert len(xs) <= WIDTH_PX + 2 and list(xs) == sorted(xs)
    places = sorted(chart.y.items())
    (low, bottom), (high, top) = places[0], places[-1]
    for extreme, place in ((min(values), max(ys)), (max(values), min(ys))):
        share = (extreme - low) / (high - low)
        assert place == pytest.approx(bottom + (top - bottom) * share, abs=0.1)


@given(st.lists(st.sampled_from([1.0, None]), max_size=9))
def test_gaps_split_a_line_and_lose_no_point(values: list[float | None]) -> None:
    losses = [1.0, *values]
    chart, finite = drawn(losses), [loss is not None for loss in losses]
    path = chart.path
    count = f"not a number: {finite.count(False)}. The line is broken there."
    assert (count in chart.rest) == (not all(finite))
    starts = sum(now and not before for before, now in zip([False, *finite], finite, strict=False))
    assert path.count("M") == starts
    assert len(path.replace("L", " ").replace("M", " ").split()) == 2 * sum(finite)


def test_the_axis_spans_the_data_and_what_lies_above_the_top_stays_inside() -> None:
    chart = drawn([0.4, 0.5, 0.9])
    assert (min(chart.y), max(chart.y)) == (0.0, 1.0)
    assert [x for x, _ in chart.points] == [LEFT_PX, (LEFT_PX + RIGHT_PX) / 2, RIGHT_PX]
    losses = [0.05] + [0.1] * 48 + [80.0]
    bounded = drawn(losses, curves.LossView(smoothing="none"))
    assert max(bounded.y) < 1 and min(y for _, y in bounded.points) == TOP_PX
    above = "Steps whose loss lies above the chart: 1; the highest is 80.0000 at step 50"
    assert above in bounded.rest


@pytest.mark.parametrize("losses", [[0.3], [0.0], [], [None]])
def test_a_point_or_nothing_can_be_drawn(losses: list[float | None]) -> None:
    chart = drawn(losses)
    if losses and losses[0] is not None:
        assert chart.path.endswith("h0.01") and "nan" not in chart.svg and "inf" not in chart.svg
    else:
        assert chart.svg.startswith('<p class="quiet">Loss: nothing was recorded.</p>')


def test_marks_and_dots_carry_their_words(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=20)
    (change,) = (event for event in run.events if event["event"] == "change")
    change["reason"] = "<b>"
    history = read_history(run.write())
    assert "Loss: nothing was recorded." in curves.loss_curve(history, curves.LossView(first=21))
    curve = curves.loss_curve(history)
    assert curve.count("<svg") == 2 and curve.count("<span>") == 4, "one legend of four lines"
    for words in (
        "step 20: validation loss 0.0555",
        "step 10: memory.micro_batch 8 -&gt; 4: &lt;b&gt;",
    ):
        assert curve.count(f"<title>{words}</title>") == 2
    saved = re.findall(r"<title>step 6: saved zorble-step\S+ and \S+ \(3\.1 MiB\)</title>", curve)
    assert len(saved) == 2
    base = "<title>validation loss of the untouched base: 0.1337</title>"
    assert curve.count(base) == 4, "at both ends of its level"
    said = re.sub(r"<[^>]+>", "", curve)
    assert "Triangles: saves. Dashed rules: recovered from out of memory. Point at a sign" in said
    for key, old, new, css in (
        ("memory.micro_batch", 8, 4, "memory"),
        ("memory.micro_batch", 4, 8, "change"),
        ("optimizer.learning_rate factor", 1.0, 0.5, "change"),
    ):
        change |= {"key": key, "old": old, "new": new}
        curve = curves.loss_curve(read_history(run.write()))
        marks = set(re.findall(r'class="mark (memory|change)"', curve))
        assert marks == {css}
        assert ("recovered from out of memory" in curve) == (css == "memory")
