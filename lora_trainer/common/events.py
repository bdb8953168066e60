"""Reports of a program: the event stream of a run, and the findings on a dataset.

A stream has one `emit` for all events and any number of listeners.

Listeners write `events.jsonl`, `problems.jsonl`, the console and the trackers. A run reports each image it
skips, value it clamps and operation it retries through `problem`: one console line, one record, one row of
the report. Findings are the rows of console, report and `check --json`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lora_trainer.common.wording import without_secrets

Severity = Literal["note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event: `kind` is its name, `fields` are plain JSON values, `time_s` is Unix time."""

    kind: str
    fields: Mapping[str, Any]
    time_s: float


Listener = Callable[[Event], None]


@dataclass
class EventStream:
    """Passes each event to all listeners in the order of subscription, one event at a time.

    Any thread may emit. The lock is reentrant because a listener may emit too.
    """

    listeners: list[Listener] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def subscribe(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event; field values must be JSON-encodable. Secrets are removed from texts.

        A library's message on a failed connection may quote a proxy address with its password.
        """
        fields = {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        with self._lock:
            event = Event(kind=kind, fields=fields, time_s=self.clock())
            for listener in self.listeners:
                listener(event)

    def problem(
        self,
        what: str,
        *,
        fix: str,
        severity: Severity = "warning",
        file: str | None = None,
        code: str = "",
    ) -> None:
        """Report `what` was skipped, clamped, retried or wrong; `fix` is the user's remedy."""
        self.emit("problem", what=what, fix=fix, severity=severity, file=file, code=code)


@dataclass
class JsonlWriter:
    """Listener that appends events whose kind passes `kinds`, one JSON object a line.

    Each line is one `write` call and flushed, so a kill can truncate only the last line. A disk error is
    reported once; the run then goes on without this record (FAULTS TRN-05).
    """

    path: Path
    kinds: Callable[[str], bool]
    events: EventStream
    _refused: bool = field(default=False, init=False)

    def __call__(self, event: Event) -> None:
        if self._refused or not self.kinds(event.kind):
            return
        row = {"event": event.kind, **event.fields, "time": round(event.time_s, 3)}
        try:
            # A lone surrogate, from a name that is no UTF-8, becomes its JSON escape.
            with self.path.open(
                "a", encoding="utf-8", errors="backslashreplace", newline="\n"
            ) as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            self._refused = True  # before `problem`, whose event comes back to this listener
            self.events.problem(
                f"{self.path.name} is no longer written: {error.strerror or error}",
                fix="free some space; the training itself goes on",
                file=self.path.name,
                code="TRN-05",
            )


def json_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of one line of a JSON-lines file, None for a line that is truncated or none."""
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the complete objects of a JSON-lines file, without a truncated last line; [] for a missing file."""
    # Not splitlines: it also splits at characters that JSON leaves inside strings, such as U+2028.
    lines = path.read_bytes().split(b"\n") if path.exists() else ()
    return [row for line in lines if (row := json_row(line)) is not None]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a JSON-lines file: rows with a kind, and with an integer step if they have a step."""
    return [
        row
        for row in read_jsonl(path)
        if isinstance(row.get("event"), str) and isinstance(row.get("step", 0), int)
    ]


# ---- findings on a dataset

MAX_FILES_NAMED = 5

# Most severe first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing found; `file` is relative to the dataset folder, `code` a case in FAULTS.

    `what` continues the file's name ("is empty"), or is a sentence of its own when `file` is None.
    Severity "error" is an image that is left out.
    """

    kind: str
    severity: Severity
    file: str | None
    what: str
    advice: str
    code: str = ""


def note(kind: str, file: str | None, what: str, *, advice: str) -> Finding:
    """Return a finding of severity "note"."""
    return Finding(kind=kind, severity="note", file=file, what=what, advice=advice)


def warning(kind: str, file: str | None, what: str, *, advice: str) -> Finding:
    """Return a finding of severity "warning"."""
    return Finding(kind=kind, severity="warning", file=file, what=what, advice=advice)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Order findings: most severe first, then by file and kind."""

    def order(finding: Finding) -> tuple[int, str, str]:
        return SEVERITIES.index(finding.severity), finding.file or "", finding.kind

    return tuple(sorted(findings, key=order))


def named(names: Iterable[str]) -> str:
    """Return the first few of many names for a sentence."""
    ordered = sorted(names)
    rest = len(ordered) - MAX_FILES_NAMED
    return ", ".join(ordered[:MAX_FILES_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def shown(text: str) -> str:
    """Return a file name fit for one line of a log: control characters and odd bytes escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
