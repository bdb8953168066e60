"""What a run wrote, in words, the newest first: its events and problems without the single steps.

Input: events of events.jsonl and problems.jsonl, of which much may not be known.
Output: escaped markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lora_trainer.common.event_kinds import (
    BaseLosses,
    Cached,
    Change,
    Cores,
    Event,
    Finished,
    ImageLosses,
    Learned,
    Measured,
    OutOfMemory,
    Problem,
    Resumed,
    RunStarted,
    Samples,
    Saved,
    Stopped,
    UnknownEvent,
    Uploaded,
    Validation,
)
from lora_trainer.common.wording import INTERRUPTED_EXIT_CODES, bytes_text, duration_text, loss_text
from lora_trainer.reporting.charts import Html

from ..markup import capital, inline, tag

# Of a change of the losses from here on it is plain that a run learns.
_LEARNS_PERCENT = 10
_SEVERITIES = ("note", "warning", "error")
_EXACTNESS = {
    "EXACT": "exactly as if it had not stopped",
    "SAME-STREAM": "with the same draws, not bit for bit",
    "CHANGED": "with what was changed",
}


_PARTS = {
    "gain": "what it learned",
    "weights": "its weights in order",
    "rank": "its rank in use",
    "strength": "its strength",
    "generalisation": "on images it never saw",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One record in words; `fix` says what to do about it, `severity` how bad it is."""

    time_s: float
    words: str
    fix: str = ""
    severity: str = ""


def log(events: Sequence[Event]) -> Html:
    """Return the records as a list, the newest first."""
    if not events:
        return tag("p", "Nothing was written yet.", class_="quiet")
    return tag(
        "ol",
        *(_item(line_of(event)) for event in reversed(events)),
        class_="log",
        lang="en",
        tabindex=0,
        translate="no",
    )


def _item(line: Line) -> Html:
    shown = time.strftime("%H:%M:%S", time.localtime(line.time_s)) if line.time_s > 0 else ""
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time_s)) if shown else None
    return tag(
        "li",
        tag("time", shown, title=day),
        tag("span", inline(_with_severity(line))),
        tag("span", inline(capital(line.fix)), class_="quiet") if line.fix else None,
        class_=line.severity or None,
    )


def _with_severity(line: Line) -> str:
    """Return the words; colour alone would not say that they are a warning to everybody."""
    return f"{line.severity}: {line.words}" if line.severity in _SEVERITIES[1:] else line.words


def line_of(event: Event) -> Line:
    """Return an event in words; one of an unknown kind is named by it."""
    time_s = event.time_s if 0 <= event.time_s < 1e11 else 0.0
    if isinstance(event, Problem):
        is_named = event.file and event.file not in event.what
        named = f"{event.file}: {event.what}" if is_named else event.what
        return Line(time_s=time_s, words=_ended(named), fix=event.fix, severity=event.severity)
    words, _, fix = _words(event).partition(" Fix: ")  # as the line of an error has both
    return Line(time_s=time_s, words=_ended(words), fix=fix, severity=_severity(event))


def _severity(event: Event) -> str:
    if isinstance(event, Stopped) and event.exit_code not in INTERRUPTED_EXIT_CODES:
        return "error"
    return "warning" if isinstance(event, OutOfMemory) else ""


def _ended(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _words(event: Event) -> str:
    match event:
        case RunStarted():
            return _started(event)
        case Resumed():
            how = _EXACTNESS.get(event.exactness, event.exactness)
            goes_on = f"Goes on at step {event.step:,}, {how}"
            differences = "; ".join(event.differences)
            return f"{goes_on}: {differences}" if differences else goes_on
        case Cached():
            made = f"{_count(event.latents)} images and {_count(event.texts)} captions"
            if event.latents == 0 == event.masks:  # of a slider, or all images were there already
                made = f"{_count(event.texts)} {'prompt' if event.texts == 1 else 'prompts'}"
                if event.texts == 0:
                    return f"All {_count(event.found)} cache entries were there already"
            return f"Cached {made} in {duration_text(event.seconds)}, " + (
                f"{_count(event.found)} were there already"
            )
        case Validation():
            return f"{_where(event.step)}: validation loss {loss_text(event.loss)}"
        case Samples():
            return f"{_where(event.step)}: {len(event.images)} sample images"
        case Saved():
            names = " and ".join(filter(None, (event.export, event.state)))
            size, took = bytes_text(event.bytes), duration_text(event.seconds)
            return f"{_where(event.step)}: saved {names} ({size} of state, {took})"
        case Change():
            return f"Changed {event.key} {event.old} -> {event.new}: {event.reason}"
        case OutOfMemory():
            return f"Out of memory with {_count(event.images_at_once)} images at a time"
        case Cores():
            others = f"Other programs use {event.taken:.1f} processors"
            gives_way = event.waiting == "asleep"
            return f"{others}: the training {'gives way to them' if gives_way else 'has its cores back'}"
        case BaseLosses():
            return "Measured the base on the images, to compare the LoRA with it"
        case Learned():
            percent = 100 * event.change
            change = f"{percent:,.0f} %" if percent >= 1 else f"{percent:.2g} %"
            verdict = "it learns" if event.learns else "it learns nothing"
            if (
                event.learns and percent >= _LEARNS_PERCENT
            ):  # how much more is a guess, and may be over 100 %
                return f"{_where(event.step)}: it learns: the losses on its own images change as they should"
            return (
                f"{_where(event.step)}: {verdict}. At this pace, the losses on its own images change by {change} in "
                "all; nearly 0 % means that it learns nothing"
            )
        case Uploaded():
            return f"Uploaded to {event.address}"
        case Measured():
            named = event.parts.items()
            parts = ", ".join(f"{_PARTS.get(name, name)} {value:.2f}" for name, value in named)
            return f"Measured the file, from 0 (bad) to 1 (good): {parts}"
        case ImageLosses():
            return f"Measured what was learned of {len(event.images)} images"
        case Finished():
            early = f", early, as {event.early}" if event.early else ""
            doubt = f", but {event.doubt}" if event.doubt else ""
            return f"Finished: {event.export}{early}{doubt}"
        case Stopped():
            # A run that was asked to stop has the step in its reason.
            if event.reason.startswith("stopped after step"):
                return capital(event.reason)
            return f"Stopped at step {event.step:,}: {event.reason}"
    name = event.name if isinstance(event, UnknownEvent) else event.kind
    return name.replace("_", " ").capitalize()


def _started(event: RunStarted) -> str:
    if event.resumed_from is not None:
        return f"Started again from step {event.resumed_from:,}"
    data = f"{_count(event.images)} images"
    if event.directions > 0:  # not a number in runs of releases without sliders
        data = "the words of a slider"
    return (
        f"Started: {_count(event.steps)} steps of batch {_count(event.batch_size)} on {data}, "
        f"{event.base} on {event.device}"
    )


def _where(step: int) -> str:
    return f"Step {step:,}" if step else "The base"


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "an unknown number of"
