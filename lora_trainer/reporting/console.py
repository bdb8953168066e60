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

from lora_trainer.common.events import Event, ListenerLost
from lora_trainer.common.wording import (
    against_base,
    bytes_text,
    clock_text,
    duration_text,
    loss_text,
    one_line,
    rate_text,
    step_seconds_text,
)
from lora_trainer.reporting.status import Smoothed, TimeLeft, measured

INTERVAL_S = 30.0
_QUIET_PHASES = ("training", "sampling", "stopping")
PHASES: Mapping[str, str] = {
    "download": "downloading base",
    "scan": "reading images",
    "plan": "planning",
    "cache": "encoding",
    "load": "loading base",
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
        fields, style = event.fields, ""
        self._time_left.take(event)
        match event.kind:
            case "phase" if not self._ended:
                name, message = PHASES.get(fields["phase"], fields["phase"]), fields["message"]
                is_quiet = name in _QUIET_PHASES
                if name != self._phase and not is_quiet and not self.console.is_terminal:
                    self._say(f"{name}: {message}" if message else name)
                done, total = fields["done"], fields["total"]
                number = bytes_text if fields["phase"] == "download" else str
                count = f"{number(done)}/{number(total)}" if total else ""
                share = f"{count} ({100 * done // total} %)" if total else number(done)
                line = f"{name} {share}" if done and not is_quiet else ""
                self._show(name, message, line, count=count, done=done, total=total)
            case "step":
                self._loss.add(measured(fields["loss"]))
                done, total = fields["step"], self._time_left.steps
                figures = (
                    f"loss {loss_text(self._loss.value)}, lr {rate_text(fields['lr'])}, "
                    f"{step_seconds_text(self._time_left.step_s)}/it, "
                    f"ETA {clock_text(self._time_left.remaining_s)}"
                )
                if fields["vram_bytes"]:
                    figures += f", VRAM {bytes_text(fields['vram_bytes'])}"
                count = f"{done}/{total}"
                line = f"step {count} ({100 * done // max(1, total)} %): {figures}"
                self._show(PHASES["train"], figures, line, count=count, done=done, total=total)
            case "validation" if fields["step"] == 0:
                self._base_loss = fields["loss"]
            case "problem":
                self._problems += 1
                style = _STYLES[fields["severity"]]
            case "finished" | "stopped":
                self.__exit__()
                self._ended = True
                is_fine = event.kind == "finished" and not fields.get("doubt")
                style = "bold green" if is_fine else _STYLES["warning"]
        for line in _lines(event, base_loss=self._base_loss, steps=self._time_left.steps):
            self._say(line, style=style)
        if event.kind in ("finished", "stopped") and self._problems:
            count = "1 problem" if self._problems == 1 else f"{self._problems} problems"
            self._say(f"{count} on the way: see problems.jsonl and the report")

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
    fields = event.fields
    match event.kind:
        case "run_started":
            count = fields["validation_images"]
            yield (
                f"{fields['name']}: {fields['steps']} steps of batch {fields['batch_size']} on "
                f"{fields['images']} images{f', {count} of them held out' if count else ''}; "
                f"{fields['family']} {fields['base']} on {fields['device']}, preset "
                f"{fields['preset']} ({fields['tier']}, {fields['priority']})"
            )
        case "problem":
            is_named = fields["file"] and fields["file"] not in fields["what"]
            file = f"{fields['file']}: " if is_named else ""
            fix = f" Fix: {fields['fix'].rstrip('.')}." if fields["fix"] else ""
            yield f"{fields['severity']}: {file}{fields['what'].rstrip('.')}.{fix}"
        case "validation" if fields["step"] == 0:
            images = f"{fields['images']} held-out images"
            yield f"validation of the base: loss {loss_text(fields['loss'])}, {images}"
        case "validation":
            loss = _compared(fields["loss"], base_loss)
            yield f"validation at step {fields['step']}: loss {loss}"
        case "measured":
            parts = ", ".join(f"{name} {value:.2f}" for name, value in fields["parts"].items())
            yield f"measured: {parts} (of 1 each); lora-train validate RUN DATASET measures the rest"
        case "resumed":
            yield f"resumed at step {fields['step']}: {fields['exactness']}"
            yield from fields["differences"]
        case "sample":
            step = f"at step {fields['step']}" if fields["step"] else "of the base"
            yield f"samples {step}: {len(fields['images'])} images"
        case "saved":
            names = " and ".join(filter(None, (fields["export"], fields["state"])))
            size, took = bytes_text(fields["bytes"]), duration_text(fields["seconds"])
            yield f"saved at step {fields['step']}: {names} ({size}, {took})"
        case "uploaded":
            yield f"uploaded: {fields['address']} ({'private' if fields['private'] else 'public'})"
        case "change":
            change = f"{fields['old']} -> {fields['new']} ({fields['reason']})"
            yield f"changed {fields['key']}: {change}"
        case "stopped":
            where = f" at step {fields['step']} of {steps}" if steps else ""
            yield f"stopped{where}: {fields['reason']}"
        case "finished":
            early = f" (ended early: {fields['early']})" if fields.get("early") else ""
            took, loss = duration_text(fields["seconds"]), "nothing was validated"
            if fields["validation_loss"] is not None:
                base_loss = measured(fields["base_validation_loss"])
                loss = f"validation loss {_compared(fields['validation_loss'], base_loss)}"
            yield f"finished {fields['step']} steps in {took}: {fields['export']}{early}; {loss}"


def _compared(loss: float, base_loss: float) -> str:
    comparison = f", {against_base(loss, base_loss)}" if math.isfinite(base_loss) else ""
    return f"{loss_text(loss)}{comparison}"
