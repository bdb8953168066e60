"""A run on the console: one live line on a terminal, sparse plain lines elsewhere.

Inputs: the run's events, a rich Console, a clock. Outputs: text only. Problems, saves, samples and
validations are one line each, in the order they happen; the last lines sum the run up. Text from
files cannot break lines, colour them or move the cursor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from lora_trainer.common.event_kinds import (
    Change,
    Event,
    Finished,
    Measured,
    Phase,
    Problem,
    Resumed,
    RunStarted,
    Samples,
    Saved,
    Step,
    Stopped,
    Uploaded,
    Validation,
)
from lora_trainer.common.events import ListenerLost
from lora_trainer.common.wording import (
    against_base,
    bytes_text,
    clock_text,
    duration_text,
    loss_text,
    one_line,
    rate_text,
    reach_text,
    step_seconds_text,
)
from lora_trainer.reporting.status import Smoothed, TimeLeft

INTERVAL_S = 30.0
_QUIET_PHASES = ("measuring base", "training", "sampling", "stopping")
PHASES: Mapping[str, str] = {
    "download": "downloading base",
    "scan": "reading images",
    "plan": "planning",
    "cache": "encoding",
    "load": "loading base",
    "base": "measuring base",
    "train": "training",
    "sample": "sampling",
    "export": "exporting",
    "report": "reporting",
    "stop": "stopping",
    "quit": "stopping",
}
_STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


@dataclass
class ConsoleListener:
    """Listener that shows a run; a context, so that the live line ends whatever ends the run."""

    title: ClassVar = "the console"
    console: Console
    clock: Callable[[], float] = time.monotonic
    lost: Callable[[], Exception | None] = lambda: None
    """Why the console cannot be written any more; None while it can."""
    _loss: Smoothed = field(default_factory=Smoothed, init=False)
    _time_left: TimeLeft = field(default_factory=TimeLeft, init=False)
    _problems: int = field(default=0, init=False)
    _base_loss: float = field(default=math.nan, init=False)
    _phase: str = field(default="", init=False)
    _ended: bool = field(default=False, init=False)
    _said: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    _bar: Progress | None = field(default=None, init=False)

    def __enter__(self) -> ConsoleListener:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=max(6, min(40, self.console.width - 84))),
                TextColumn("{task.fields[count]}", markup=False),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self.console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task("starting", total=None, count="", figures="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            # Whatever rich raises on a terminal that is gone or odd must not take the place of how the run ended.
            with suppress(Exception):
                bar.stop()

    def __call__(self, event: Event) -> None:
        if (error := self.lost()) is not None:
            raise ListenerLost(f"it cannot be written: {error}")
        style = ""
        self._time_left.take(event)
        match event:
            case Phase() if not self._ended:
                self._show_phase(event)
            case Step():
                self._show_step(event)
            case Validation(step=0):
                self._base_loss = event.loss
            case Problem():
                self._problems += 1
                style = _STYLES[event.severity]
            case Finished() | Stopped():
                self.__exit__()
                self._ended = True
                is_fine = isinstance(event, Finished) and not event.doubt
                style = "bold green" if is_fine else _STYLES["warning"]
        for line in _lines(event, base_loss=self._base_loss, steps=self._time_left.steps):
            self._say(line, style=style)
        if isinstance(event, Finished | Stopped) and self._problems:
            count = "1 problem" if self._problems == 1 else f"{self._problems} problems"
            self._say(f"{count} on the way: see problems.jsonl and the report")

    def _show_phase(self, event: Phase) -> None:
        name, message = PHASES.get(event.phase, event.phase), event.message
        is_quiet = name in _QUIET_PHASES
        if name != self._phase and not is_quiet and not self.console.is_terminal:
            self._say(f"{name}: {message}" if message else name)
        done, total = event.done, event.total
        number = bytes_text if event.phase == "download" else str
        count = f"{number(done)}/{number(total)}" if total else ""
        share = f"{count} ({100 * done // total} %)" if total else number(done)
        line = f"{name} {share}" if done and not is_quiet else ""
        self._show(name, message, line, count=count, done=done, total=total)

    def _show_step(self, event: Step) -> None:
        self._loss.add(event.loss)
        done, total = event.step, self._time_left.steps
        figures = (
            f"loss {loss_text(self._loss.value)}, lr {rate_text(event.lr)}, "
            f"{step_seconds_text(self._time_left.step_s)}/it, "
            f"ETA {clock_text(self._time_left.remaining_s)}"
        )
        if event.vram_bytes:
            figures += f", VRAM {bytes_text(event.vram_bytes)}"
        count = f"{done}/{total}"
        line = f"step {count} ({100 * done // max(1, total)} %): {figures}"
        self._show(PHASES["train"], figures, line, count=count, done=done, total=total)

    def _say(self, line: str, *, style: str = "") -> None:
        encoding = self.console.encoding
        printable = one_line(line).encode(encoding, errors="replace").decode(encoding)
        self.console.print(Text(printable, style=style), soft_wrap=True)

    def _show(
        self, name: str, figures: str, line: str, *, count: str, done: int, total: int
    ) -> None:
        """Update the live line; elsewhere print a line at every tenth of the way, and after 30 s without one."""
        self._phase = name
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(
                task, description=name, completed=done, count=count, figures=one_line(figures)
            )
            self._bar.tasks[0].total = total or None  # update() cannot set a total back to unknown
        if line and not self.console.is_terminal:
            tenth, now_s = done * 10 // total if total else 0, self.clock()
            last_tenth, last_s = self._said.setdefault(name, (0, now_s))
            if tenth != last_tenth or now_s - last_s >= INTERVAL_S:
                self._said[name] = (tenth, now_s)
                self._say(line)

    def show_file(self, file: Path) -> None:
        """Say where the LoRA lies; only the process that told of the end of the run does."""
        if self._ended:
            folder = file.parent
            there = {
                "samples": (folder / "samples").is_dir(),
                "report.html": (folder / "report.html").is_file(),
            }
            beside = [name for name, is_there in there.items() if is_there]
            lie = f"; {' and '.join(beside)} beside it" if beside else ""
            with suppress(Exception):  # as in `__exit__`: the file is there
                self._say(f"the LoRA: {file}{lie}")


def _lines(event: Event, *, base_loss: float, steps: int) -> Iterator[str]:
    """Yield what is said of an event in lines that stay."""
    match event:
        case RunStarted():
            count = event.validation_images
            data = f"{event.images} images{f', {count} of them held out' if count else ''}"
            if event.directions > 0:  # not a number in runs of releases without sliders
                word = "direction" if event.directions == 1 else "directions"
                data = f"a slider of {event.directions} {word}"
            if event.pairs > 0:
                data = f"a slider of {event.pairs} pairs of images: {data}"
            yield (
                f"{event.name}: {event.steps} steps of batch {event.batch_size} on {data}; "
                f"{event.family} {event.base} on {event.device}, preset "
                f"{event.preset} ({event.tier}, {event.priority})"
            )
        case Problem():
            is_named = event.file and event.file not in event.what
            file = f"{event.file}: " if is_named else ""
            fix = f" Fix: {event.fix.rstrip('.')}." if event.fix else ""
            yield f"{event.severity}: {file}{event.what.rstrip('.')}.{fix}"
        case Validation(step=0):
            images = f"{event.images} held-out images"
            yield f"validation of the base: loss {loss_text(event.loss)}, {images}"
        case Validation():
            yield f"validation at step {event.step}: loss {_compared(event.loss, base_loss)}"
        case Measured():
            parts = ", ".join(f"{name} {value:.2f}" for name, value in event.parts.items())
            if len(event.reach) == 2:
                yield f"measured: {parts} (of 1 each); {reach_text(event.reach)}"
            else:
                yield f"measured: {parts} (of 1 each); lora-train validate RUN DATASET measures the rest"
        case Resumed():
            yield f"resumed at step {event.step}: {event.exactness}"
            yield from event.differences
        case Samples():
            step = f"at step {event.step}" if event.step else "of the base"
            yield f"samples {step}: {len(event.images)} images"
        case Saved():
            names = " and ".join(filter(None, (event.export, event.state)))
            size, took = bytes_text(event.bytes), duration_text(event.seconds)
            yield f"saved at step {event.step}: {names} ({size}, {took})"
        case Uploaded():
            yield f"uploaded: {event.address} ({'private' if event.private else 'public'})"
        case Change():
            yield f"changed {event.key}: {event.old} -> {event.new} ({event.reason})"
        case Stopped():
            where = f" at step {event.step} of {steps}" if steps else ""
            yield f"stopped{where}: {event.reason}"
        case Finished():
            early = f" (ended early: {event.early})" if event.early else ""
            took, loss = duration_text(event.seconds), "nothing was validated"
            if not math.isnan(event.validation_loss):
                compared = _compared(event.validation_loss, event.base_validation_loss)
                loss = f"validation loss {compared}"
            yield f"finished {event.step} steps in {took}: {event.export}{early}; {loss}"


def _compared(loss: float, base_loss: float) -> str:
    comparison = f", {against_base(loss, base_loss)}" if math.isfinite(base_loss) else ""
    return f"{loss_text(loss)}{comparison}"
