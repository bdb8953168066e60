"""What is said while a run goes: how often, in how many lines, nothing that texts can forge."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lora_trainer.common.events import EventStream
from lora_trainer.common.wording import (
    against_base,
    bytes_text,
    clock_text,
    duration_text,
    loss_text,
    one_line,
    rate_text,
)
from lora_trainer.reporting.console import ConsoleListener
from lora_trainer.reporting.status import Smoothed, TimeLeft
from tests.fakes.run_folder import fake_run, relay

STEP = {
    "images": 8,
    "lr": 2e-3,
    "grad_norm": 0.5,
    "seconds": 0.2,
    "data_wait_s": 0.0,
    "vram_bytes": 0,
    "vram_reserved_bytes": 0,
    "vram_used_bytes": 0,
    "host_bytes": 1 << 30,
    "epoch": 0.1,
}


def still() -> float:
    return 0.0


def plain(*, clock: Callable[[], float] = still) -> tuple[ConsoleListener, io.StringIO]:
    out = io.StringIO()
    return ConsoleListener(Console(file=out, force_terminal=False, width=60), clock=clock), out


def emit_steps(events: EventStream, count: int, *, total: int, **changed: Any) -> None:
    events.emit(
        "run_started", name="n", family="f", base="b", steps=total, batch_size=1, device="cpu",
        tier="cpu", priority="balanced", preset="p", images=3, validation_images=0,
        resumed_from=None, every_steps={"sample": 0, "validation": 0},
    )  # fmt: skip
    for step in range(1, count + 1):
        events.emit("step", **{**STEP, "step": step, "loss": 0.1, **changed})


def test_a_whole_run_in_plain_lines(tmp_path: Path) -> None:
    show, out = plain()
    with show:
        relay(fake_run(tmp_path), EventStream(listeners=[show]))
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{30 * n}/300" for n in range(1, 11)]
    assert lines[0].startswith("zorble: 300 steps of batch 8 on 16 images, 2 of them held out")
    assert "encoding 16/16 (100 %)" in lines
    for kind, count in {"samples ": 4, "saved at": 3, "validation": 11, "changed": 1}.items():
        assert len([line for line in lines if line.startswith(kind)]) == count, kind
    assert lines[-2].startswith("finished 300 steps in 1 min")
    assert lines[-2].endswith("validation loss 0.0555, 58 % below the base's")
    assert lines[-1] == "4 problems on the way: see problems.jsonl and the report"


def test_a_problem_is_one_line_with_its_fix(tmp_path: Path) -> None:
    show, out = plain()
    relay(fake_run(tmp_path, steps=3), EventStream(listeners=[show]))
    assert (
        "warning: broken/owl <b>17</b>.jpg: image is cut off after 81,220 bytes and was left out."
        " Fix: export it again." in out.getvalue().splitlines()
    )


@pytest.mark.parametrize(("private", "said"), [(True, "private"), (False, "public")])
def test_an_upload_is_one_line_with_its_address(private: bool, said: str) -> None:
    show, out = plain()
    address = "https://huggingface.co/me/tabby"
    EventStream(listeners=[show]).emit("uploaded", address=address, private=private)
    assert out.getvalue().splitlines() == [f"uploaded: {address} ({said})"]


def test_sample_images_are_counted_on_the_live_line_only() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])
    for done in range(4):
        events.emit("phase", phase="sample", message="sample images", done=done, total=4)
    assert out.getvalue() == ""


def test_validation_says_how_it_compares(tmp_path: Path) -> None:
    show, out = plain()
    relay(fake_run(tmp_path), EventStream(listeners=[show]))
    assert "validation of the base: loss 0.1337, 2 held-out images" in out.getvalue()
    assert "validation at step 300: loss 0.0555, 58 % below the base's" in out.getvalue()


def test_slow_runs_speak_every_half_minute() -> None:
    seconds = itertools.count(step=12.0)
    show, out = plain(clock=lambda: next(seconds))
    emit_steps(EventStream(listeners=[show]), 31, total=10_000)
    steps = [int(number) for number in re.findall(r"^step (\d+)/", out.getvalue(), re.MULTILINE)]
    assert steps == list(range(4, 32, 3))


def test_quick_runs_do_not_flood() -> None:
    show, out = plain()
    emit_steps(EventStream(listeners=[show]), 5000, total=5000)
    assert len(out.getvalue().splitlines()) == 11


@given(st.text())
def test_no_text_breaks_a_line_or_moves_the_cursor(hostile: str) -> None:
    show, out = plain()
    EventStream(listeners=[show]).problem(f"x{hostile}", fix=hostile, file=hostile)
    said = out.getvalue()
    assert said.count("\n") == 1 and said.endswith("\n")
    assert said[:-1].isprintable() and said.startswith("warning: ")


def test_markup_of_rich_is_text() -> None:
    show, out = plain()
    EventStream(listeners=[show]).problem("[red]a[/red] [link=x]y[/link]", fix="none")
    assert "[red]a[/red] [link=x]y[/link]" in out.getvalue()


def test_terminals_without_unicode_do_not_raise() -> None:
    buffer = io.BytesIO()
    out = io.TextIOWrapper(buffer, encoding="ascii", errors="strict", write_through=True)
    show = ConsoleListener(Console(file=out, force_terminal=False))
    EventStream(listeners=[show]).problem("ゾーブル", fix="rename it")
    assert buffer.getvalue() == b"warning: ????. Fix: rename it.\n"


def test_a_loss_that_is_no_number_is_passed_over() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])
    emit_steps(events, 1, total=4)
    events.emit("step", **{**STEP, "step": 2, "loss": None, "grad_norm": None})
    assert "step 2/4 (50 %): loss 0.1000" in out.getvalue()


def test_vram_is_shown_where_there_is_any() -> None:
    show, out = plain()
    emit_steps(EventStream(listeners=[show]), 1, total=1, vram_bytes=9 << 30)
    assert out.getvalue().splitlines()[-1].endswith("VRAM 9.0 GiB")


def terminal() -> tuple[ConsoleListener, io.StringIO]:
    out = io.StringIO()
    return ConsoleListener(Console(file=out, force_terminal=True, width=110), clock=still), out


def test_live_line_ends_with_the_last_figures(tmp_path: Path) -> None:
    show, out = terminal()
    run = fake_run(tmp_path)
    with show:
        relay(run, EventStream(listeners=[show]))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "300/300" not in shown  # the last phase is the export, not the steps
    assert "exporting" in shown and "finished 300 steps" in shown
    assert not [line for line in shown.splitlines() if line.startswith("step ")]
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_live_line_shows_training(tmp_path: Path) -> None:
    show, out = terminal()
    with show:
        emit_steps(EventStream(listeners=[show]), 7, total=20)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    last = [line for line in shown.splitlines() if "training" in line][-1]
    for words in ("7/20", "loss 0.1000", "lr 2e-3", "0.20 s/it", "ETA 0:0"):
        assert words in last


def test_live_line_ends_when_the_run_raises() -> None:
    show, out = terminal()
    with pytest.raises(ZeroDivisionError), show:
        emit_steps(EventStream(listeners=[show]), 1, total=2)
        raise ZeroDivisionError
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_stop_says_where_and_why_and_nothing_follows() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])
    emit_steps(events, 1, total=4)
    events.emit("stopped", reason="asked to stop. Fix: use --resume.", exit_code=130, step=1)
    events.emit("phase", phase="report", message="report.html", done=0, total=0)
    assert out.getvalue().endswith("stopped at step 1 of 4: asked to stop. Fix: use --resume.\n")


def time_left(*, steps: int, **every_steps: int) -> tuple[TimeLeft, EventStream]:
    left, events = TimeLeft(), EventStream(clock=lambda: 0.0)
    events.subscribe(left.take)
    events.emit("run_started", steps=steps, resumed_from=None, every_steps=every_steps)
    return left, events


def test_time_left_is_the_median_plus_side_costs() -> None:
    left, events = time_left(steps=298)
    now_s = 0.0
    events.clock = lambda: now_s
    for step in range(1, 101):
        seconds = 1.0 if step != 95 else 61.0  # one hiccup must not count in the median
        now_s += seconds
        events.emit("step", step=step, seconds=seconds)
        if step % 10 == 0 and step < 100:
            now_s += 5.0
    assert left.step_s == 1.0
    assert math.isclose(left.side_s, 45 / 99)
    assert math.isclose(left.remaining_s, 198 + 90)


def test_late_losses_in_bunches_cost_nothing() -> None:
    left, events = time_left(steps=100)
    assert math.isnan(left.remaining_s)
    for step in range(1, 41):
        events.clock = partial(float, 4.0 * math.ceil(step / 4))
        events.emit("step", step=step, seconds=1.0)
    assert left.side_s < 0.03


def test_time_left_counts_the_rounds_that_are_due() -> None:
    """At each step of a run in equal steps, time left is the truth: also before the first round is repeated."""
    left, events = time_left(steps=100, sample=40, validation=30)
    now_s, promised_end_s = 0.0, []
    events.clock = lambda: now_s

    def between(step: int) -> None:
        nonlocal now_s
        for kind, every, seconds in (("validation", 30, 8.0), ("sample", 40, 25.0)):
            if step % every == 0 or step == 100:
                now_s += seconds
                events.emit(kind, step=step, seconds=seconds)

    between(0)
    for step in range(1, 101):
        now_s += 2.0
        events.emit("step", step=step, seconds=2.0)
        promised_end_s.append(now_s + left.remaining_s)
        between(step)
    assert promised_end_s == pytest.approx([now_s] * 100)
    assert left.remaining_s == 0.0


@given(st.lists(st.floats(0.01, 10), min_size=1), st.floats(1, 100))
def test_smoothing_stays_within_what_it_saw(values: list[float], span: float) -> None:
    average = Smoothed(span_steps=span)
    for value in values:
        average.add(value)
    average.add(math.nan)
    assert min(values) * (1 - 1e-9) <= average.value <= max(values) * (1 + 1e-9)


def test_smoothing_follows_recent_values() -> None:
    average = Smoothed(span_steps=9)
    for value in [1.0] * 50 + [0.0] * 9:
        average.add(value)
    assert 0.05 < average.value < 0.2


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (duration_text(8.44), "8.4 s"),
        (duration_text(59.97), "1 min 00 s"),
        (duration_text(252), "4 min 12 s"),
        (duration_text(7500), "2 h 05 min"),
        (duration_text(math.nan), "unknown"),
        (clock_text(38.4), "0:38"),
        (clock_text(7509), "2:05:09"),
        (bytes_text(812), "812 B"),
        (bytes_text(3_288_000), "3.1 MiB"),
        (bytes_text(1024**3 - 1), "1.0 GiB"),
        (bytes_text(3 << 40), "3072.0 GiB"),
        (loss_text(0.05551), "0.0555"),
        (loss_text(0.00004), "4.0e-05"),
        (loss_text(0.0), "0.0000"),
        (loss_text(math.inf), "not a number"),
        (rate_text(1.9e-4), "1.9e-4"),
        (rate_text(2e-3), "2e-3"),
        (rate_text(0.0), "0"),
        (against_base(0.06, 0.1), "40 % below the base's"),
        (against_base(0.1034, 0.1), "3.4 % above the base's"),
        (against_base(0.10001, 0.1), "the same as the base's"),
        (against_base(0.1, 0.0), "not comparable with the base's"),
        (one_line("a\nb\x1b[31m\tc"), "a b?[31m c"),
    ],
)
def test_wording(said: str, expected: str) -> None:
    assert said == expected
