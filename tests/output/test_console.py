"""What is said while a run goes: how often, in how many lines, nothing that texts can forge."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lora_trainer.common.events import EventStream
from lora_trainer.reporting.console import ConsoleListener
from tests.fakes.made_events import made
from tests.fakes.run_folder import FIELDS, fake_run, relay

STEP = {**FIELDS["step"], "lr": 2e-3, "epoch": 0.1}


# `float` is a clock that stands still.
def plain(*, clock: Callable[[], float] = float) -> tuple[ConsoleListener, io.StringIO]:
    out = io.StringIO()
    return ConsoleListener(Console(file=out, force_terminal=False, width=60), clock=clock), out


def emit_steps(events: EventStream, count: int, *, total: int, **changed: Any) -> None:
    every_steps = {"sample": 0, "validation": 0}
    started = {**FIELDS["run_started"], "validation_images": 0, "every_steps": every_steps}
    events.emit(made("run_started", **started, steps=total))
    for step in range(1, count + 1):
        events.emit(made("step", **{**STEP, "step": step, "loss": 0.1, **changed}))


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
    # Only what is there is named: a full disk may have refused the report.
    for beside, said in (("", ""), ("report.html", "; report.html beside it")):
        (tmp_path / beside).touch()
        show.show_file(tmp_path / "zorble.safetensors")
        line = out.getvalue().splitlines()[-1]
        assert line == f"the LoRA: {tmp_path}/zorble.safetensors{said}"
    for line in (
        "validation of the base: loss 0.1337, 2 held-out images",
        "validation at step 300: loss 0.0555, 58 % below the base's",
        "warning: broken/owl <b>17</b>.jpg: image is cut off after 81,220 bytes and was left out."
        " Fix: export it again.",
    ):
        assert line in lines


def test_other_lines() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])
    emit_steps(events, 0, total=4)
    begun = len(out.getvalue())
    address = "https://huggingface.co/me/tabby"
    for private in (True, False):
        events.emit(made("uploaded", address=address, private=private))
    for done in range(4):  # sample images are counted on the live line only
        events.emit(made("phase", phase="sample", message="sample images", done=done, total=4))
    events.emit(made("resumed", step=3, exactness="CHANGED", differences=["a: 1 -> 2"]))
    events.emit(made("measured", step=3, parts={"gain": 0.5}))
    losses = {"validation_loss": 0.06, "base_validation_loss": 0.1}  # of before the resume
    events.emit(made("finished", step=3, seconds=1.0, export="x", **losses))
    events.emit(made("stopped", reason="asked to stop. Fix: use --resume.", exit_code=130, step=1))
    events.emit(
        made("phase", phase="report", message="report.html", done=0, total=0)
    )  # not told of
    assert out.getvalue()[begun:].splitlines() == [
        f"uploaded: {address} (private)",
        f"uploaded: {address} (public)",
        "resumed at step 3: CHANGED",
        "a: 1 -> 2",
        "measured: gain 0.50 (of 1 each); lora-train validate RUN DATASET measures the rest",
        "finished 3 steps in 1.0 s: x; validation loss 0.0600, 40 % below the base's",
        "stopped at step 1 of 4: asked to stop. Fix: use --resume.",
    ]


def test_slow_runs_speak_every_half_minute() -> None:
    seconds = itertools.count(step=12.0)
    show, out = plain(clock=lambda: next(seconds))
    emit_steps(EventStream(listeners=[show]), 31, total=10_000)
    steps = [int(number) for number in re.findall(r"^step (\d+)/", out.getvalue(), re.MULTILINE)]
    assert steps == list(range(4, 32, 3))


@given(st.text())
def test_no_text_breaks_a_line_or_moves_the_cursor(hostile: str) -> None:
    show, out = plain()
    EventStream(listeners=[show]).problem(f"x{hostile}", fix=hostile, file=hostile)
    said = out.getvalue()
    assert said.count("\n") == 1 and said.endswith("\n")
    assert said[:-1].isprintable() and said.startswith("warning: ")


def test_markup_of_rich_is_text_and_a_terminal_without_unicode_does_not_raise() -> None:
    buffer = io.BytesIO()
    out = io.TextIOWrapper(buffer, encoding="ascii", errors="strict", write_through=True)
    show = ConsoleListener(Console(file=out, force_terminal=False))
    EventStream(listeners=[show]).problem("[red]ゾーブル[/red]", fix="rename it")
    assert buffer.getvalue() == b"warning: [red]????[/red]. Fix: rename it.\n"


def test_a_loss_that_is_no_number_is_passed_over_and_vram_is_shown_where_there_is_any() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])
    emit_steps(events, 1, total=4)
    without_loss = {"loss": None, "grad_norm": None, "vram_bytes": 9 << 30}
    events.emit(made("step", **{**STEP, "step": 2, **without_loss}))
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("step 2/4 (50 %): loss 0.1000") and last.endswith("VRAM 9.0 GiB")


def test_live_line_shows_training_and_ends_with_the_last_figures_or_when_the_run_raises(
    tmp_path: Path,
) -> None:
    def shown(*, fails: bool) -> str:
        out = io.StringIO()
        terminal = Console(file=out, force_terminal=True, width=110)
        with ConsoleListener(terminal, clock=float) as show:
            if fails:
                emit_steps(EventStream(listeners=[show]), 7, total=20)
                raise ZeroDivisionError(out)
            relay(fake_run(tmp_path), EventStream(listeners=[show]))
        return out.getvalue()

    with pytest.raises(ZeroDivisionError) as caught:
        shown(fails=True)
    written = caught.value.args[0].getvalue(), shown(fails=False)
    for text in written:  # the cursor is shown again
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    raised, whole = (re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in written)
    last = [line for line in raised.splitlines() if "training" in line][-1]
    for words in ("7/20", "loss 0.1000", "lr 2e-3", "0.19 s/it", "ETA 0:0"):
        assert words in last
    assert "300/300" not in whole  # the last phase is the export, not the steps
    assert "exporting" in whole and "finished 300 steps" in whole
    assert not [line for line in whole.splitlines() if line.startswith("step ")]


def test_figures_in_words() -> None:
    show, out = plain()
    events = EventStream(listeners=[show])

    def last_line() -> str:
        return out.getvalue().splitlines()[-1]

    for size_bytes, seconds, words in (
        (812, 8.44, "(812 B, 8.4 s)"),
        (1024**3 - 1, 252, "(1.0 GiB, 4 min 12 s)"),
        (0, math.nan, "(0 B, unknown)"),
    ):
        saved = {"step": 3, "export": "a\nb\x1b[31m\tc", "state": None, "seconds": seconds}
        events.emit(made("saved", **saved, bytes=size_bytes))
        assert last_line() == f"saved at step 3: a b?[31m c {words}"
    for base, loss, words in (
        (0.1, 0.06, "0.0600, 40 % below the base's"),
        (0.1, 0.1034, "0.1034, 3.4 % above the base's"),
        (0.1, 0.10001, "0.1000, the same as the base's"),
        (0.1, math.inf, "not a number, not comparable with the base's"),
        (math.nan, 0.0, "0.0000"),
    ):
        events.emit(made("validation", step=0, loss=base, images=2))
        events.emit(made("validation", step=5, loss=loss, images=2))
        assert last_line() == f"validation at step 5: loss {words}"
    for lr, seconds, words in (
        (2e-3, 7509, "lr 2e-3, 7509.00 s/it, ETA 2:05:09"),
        (0.0, 0.038, "lr 0, 38 ms/it, ETA 0:00"),
    ):
        show, out = plain()
        emit_steps(EventStream(listeners=[show]), 1, total=2, lr=lr, seconds=seconds)
        assert last_line().endswith(words)
