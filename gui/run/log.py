"""What a run wrote, in words, the newest first: its events and problems without the single steps.

Input: rows of events.jsonl and problems.jsonl, of which any field may be missing or of another kind.
Output: escaped markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lora_trainer.common.wording import INTERRUPTED_EXIT_CODES, bytes_text, duration_text, loss_text
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import Row, mapping, number, sequence

from ..markup import inline, tag

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


def log(rows: Sequence[Row]) -> Html:
    """Return the records as a list, the newest first."""
    if not rows:
        return tag("p", "Nothing was written yet.", class_="quiet")
    return tag(
        "ol",
        *(_item(line_of(row)) for row in reversed(rows)),
        class_="log",
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
        tag("span", inline(line.fix), class_="quiet") if line.fix else None,
        class_=line.severity or None,
    )


def _with_severity(line: Line) -> str:
    """Return the words; colour alone would not say that they are a warning to everybody."""
    return f"{line.severity}: {line.words}" if line.severity in _SEVERITIES[1:] else line.words


def line_of(row: Row) -> Line:
    """Return a record in words; one of an unknown kind is named by it."""
    time_s = number(row, "time")
    time_s = time_s if math.isfinite(time_s) and 0 <= time_s < 1e11 else 0.0
    if row.get("event") == "problem":
        severity = str(row.get("severity"))
        file = row.get("file")
        what = str(row.get("what", ""))
        named = f"{file}: {what}" if file and str(file) not in what else what
        return Line(
            time_s=time_s,
            words=_ended(named),
            fix=str(row.get("fix") or ""),
            severity=severity if severity in _SEVERITIES else "warning",
        )
    words, _, fix = _words(row).partition(" Fix: ")  # as the line of an error has both
    return Line(time_s=time_s, words=_ended(words), fix=fix, severity=_severity(row))


def _severity(row: Row) -> str:
    kind = row.get("event")
    if kind == "stopped" and number(row, "exit_code") not in INTERRUPTED_EXIT_CODES:
        return "error"
    return "warning" if kind == "out_of_memory" else ""


def _ended(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _words(row: Row) -> str:
    match row.get("event"):
        case "run_started":
            return _started(row)
        case "resumed":
            how = str(row.get("exactness"))
            differences = "; ".join(map(str, sequence(row, "differences")))
            goes_on = f"Goes on at step {_count(row, 'step')}, {_EXACTNESS.get(how, how)}"
            return f"{goes_on}: {differences}" if differences else goes_on
        case "cached":
            made = f"{_count(row, 'latents')} images and {_count(row, 'texts')} captions"
            return f"Cached {made} in {duration_text(number(row, 'seconds'))}, " + (
                f"{_count(row, 'found')} were there already"
            )
        case "validation":
            return f"{_where(row)}: validation loss {loss_text(number(row, 'loss'))}"
        case "sample":
            return f"{_where(row)}: {len(sequence(row, 'images'))} sample images"
        case "saved":
            return _saved(row)
        case "change":
            changed = f"{row.get('key')} {row.get('old')} -> {row.get('new')}"
            return f"Changed {changed}: {row.get('reason')}"
        case "out_of_memory":
            return f"Out of memory with {_count(row, 'images_at_once')} images at a time"
        case "cores":
            others = f"Other programs use {number(row, 'taken'):.1f} processors"
            gives_way = row.get("waiting") == "asleep"
            return f"{others}: the training {'gives way to them' if gives_way else 'has its cores back'}"
        case "learned":
            change = 100 * number(row, "change")
            return f"{_where(row)}: losses of trained pictures will have moved by {change:.2g} %"
        case "uploaded":
            return f"Uploaded to {row.get('address')}"
        case "measured":
            named = mapping(row, "parts").items()
            parts = (
                f"{_PARTS.get(name, name)} {number({name: value}, name):.2f}"
                for name, value in named
            )
            return f"How good the file is, of 1 each: {', '.join(parts)}"
        case "finished":
            early = f", early, as {row['early']}" if row.get("early") else ""
            doubt = f", but {row['doubt']}" if row.get("doubt") else ""
            return f"Finished: {row.get('export')}{early}{doubt}"
        case "stopped":
            return f"Stopped at step {_count(row, 'step')}: {row.get('reason')}"
        case kind:
            return str(kind).replace("_", " ").capitalize()


def _started(row: Row) -> str:
    if isinstance(row.get("resumed_from"), int):
        return f"Started again from step {_count(row, 'resumed_from')}"
    return (
        f"Started: {_count(row, 'steps')} steps of batch {_count(row, 'batch_size')} on "
        f"{_count(row, 'images')} images, {row.get('base')} on {row.get('device')}"
    )


def _saved(row: Row) -> str:
    names = " and ".join(str(row[key]) for key in ("export", "state") if row.get(key))
    size, took = bytes_text(_known(number(row, "bytes"))), duration_text(number(row, "seconds"))
    return f"{_where(row)}: saved {names} ({size} of state, {took})"


def _where(row: Row) -> str:
    return f"Step {_count(row, 'step')}" if row.get("step") else "The base"


def _count(row: Row, key: str) -> str:
    value = number(row, key)
    return f"{value:,.0f}" if math.isfinite(value) else "an unknown number of"


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
