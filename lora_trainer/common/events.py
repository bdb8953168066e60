"""Reports of a program: the event stream of a run, and the findings on a dataset.

A stream has one `emit` for all events (event_kinds.py) and any number of listeners.

Listeners write `events.jsonl`, `problems.jsonl`, the console and the trackers. A run reports each image it
skips, value it clamps and operation it retries through `problem`: one console line, one record, one row of
the report. Findings are the rows of console, report and `check --json`.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import first_line
from lora_trainer.common.event_kinds import SEVERITIES, Event, Problem, Severity, event_of_row
from lora_trainer.common.files import bounded_int, disk_error, read_regular, unreadable
from lora_trainer.common.wording import escaped, json_text, one_line, without_secrets

Listener = Callable[[Event], None]


class ListenerLost(Exception):
    """Raised by a listener that nobody can hear any more, such as a console without a reader."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


@dataclass
class EventStream:
    """Passes each event to all listeners in the order of subscription, one event at a time.

    Any thread may emit. The lock is reentrant because a listener may emit too. No listener can end a run: one
    that raises is a problem and gets no more events, unless it is a record of the run, which is tried again with
    the next event.
    """

    listeners: list[Listener] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    _records: set[int] = field(default_factory=set, init=False, repr=False)
    _failed: set[int] = field(default_factory=set, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def subscribe(self, listener: Listener, *, is_record: bool = False) -> None:
        self.listeners.append(listener)
        if is_record:
            self._records.add(id(listener))

    def unsubscribe(self, listener: Listener) -> None:
        """Pass no more events to a listener, which may have been dropped already."""
        with self._lock, suppress(ValueError):
            self.listeners.remove(listener)

    def emit(self, event: Event) -> None:
        """Emit an event, with the time. Secrets are removed from its texts.

        A library's message on a failed connection may quote a proxy address with its password.
        """
        texts: dict[str, Any] = {
            name: without_secrets(text) for name, text in event.text_values.items()
        }
        with self._lock:
            event = replace(event, **texts, time_s=self.clock())
            for listener in tuple(self.listeners):
                try:
                    listener(event)
                except MemoryError:
                    # Not its fault; a step that needs the memory raises the error again.
                    continue
                except Exception as error:  # noqa: BLE001 - see above, and listeners share no base error
                    self._has_failed(listener, error)

    def _has_failed(self, listener: Listener, error: Exception) -> None:
        if id(listener) not in self._records:
            self.unsubscribe(listener)
        if id(listener) in self._failed:
            return
        self._failed.add(id(listener))
        name = getattr(listener, "title", "") or getattr(
            listener, "__qualname__", type(listener).__name__
        )
        reason = (
            error.found
            if isinstance(error, ListenerLost)
            else (f"{type(error).__name__}: {first_line(error)}")
        )
        self.problem(
            f"{name} gets no more events of the run: {one_line(reason)}",
            fix="nothing to do: the training continues, and events.jsonl has every event",
            code="TRN-05",
        )

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
        self.emit(Problem(what=what, fix=fix, severity=severity, file=file, code=code))


# A listener that is so far behind hangs: about 10 MB of events.
MOST_WAITING = 10_000


class Aside:
    """Listener that passes events on in a thread of its own, so that a slow or hanging one delays no run.

    `start` runs first, in the same thread; if it returns False, nothing is passed on. `title` names the listener.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        events: EventStream,
        title: str,
        start: Callable[[], bool] = lambda: True,
    ) -> None:
        self.title = title
        self._listener, self._events, self._start = listener, events, start
        self._waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._is_behind = False
        self._thread = threading.Thread(target=self._work, name="lora-train-aside", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._is_behind:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._is_behind = True
            raise ListenerLost(f"it has not taken the last {MOST_WAITING:,} events") from None

    def _work(self) -> None:
        try:
            is_on = self._start()
            while (event := self._waiting.get()) is not None:
                if is_on:
                    self._listener(event)
        except Exception as error:  # noqa: BLE001 - as in `EventStream.emit`
            self._is_behind = True
            self._events.problem(
                f"{self.title} gets no more events of the run: {type(error).__name__}: {first_line(error)}",
                fix="nothing to do: the training continues, and events.jsonl has every event",
                code="TRN-05",
            )

    def close(self, *, within_s: float) -> None:
        """Let it take what it was given; one that has not after `within_s` is left, as a problem."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._events.problem(
                f"{self.title} did not end within {within_s:g} s; the training ends without it",
                fix="check its service; events.jsonl has every event",
                code="TRN-05",
            )


@dataclass
class JsonlWriter:
    """Listener that appends the events that it `takes`, one JSON object a line.

    Each line is one `write` call and flushed, so a kill can truncate only the last line. A disk error is
    reported once; the run then goes on without this record (TRN-05 in docs/faults.md).
    """

    path: Path
    takes: Callable[[Event], bool]
    events: EventStream
    _refused: bool = field(default=False, init=False)

    def __call__(self, event: Event) -> None:
        if self._refused or not self.takes(event):
            return
        row = {"event": event.kind, **event.fields, "time": round(event.time_s, 3)}
        try:
            # A lone surrogate, from a name that is not UTF-8, becomes its JSON escape.
            with self.path.open(
                "a", encoding="utf-8", errors="backslashreplace", newline="\n"
            ) as file:
                file.write(json_text(row) + "\n")
        except OSError as error:
            self._refused = True  # before `problem`, whose event comes back to this listener
            self.events.problem(
                f"nothing more is written to {self.path.name}: {error.strerror or error}",
                fix=f"the training itself goes on; {disk_error(self.path, error).fix}",
                file=self.path.name,
                code="TRN-05",
            )


def json_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of one line of a JSON-lines file, None for a line that is truncated or none."""
    try:
        row = json.loads(line.decode("utf-8", errors="replace"), parse_int=bounded_int)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the complete objects of a JSON-lines file, without a truncated last line; [] for a missing file.

    Raises MachineError for a file that cannot be read.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    # Not splitlines: it also splits at characters that JSON leaves inside strings, such as U+2028.
    lines = content.split(b"\n")
    return [row for line in lines if (row := json_row(line)) is not None]


def read_events(path: Path) -> list[Event]:
    """Read the events of a JSON-lines file; rows that are none are left out. Raises as `read_jsonl` does."""
    return [event for row in read_jsonl(path) if (event := event_of_row(row)) is not None]


# ---- findings on a dataset

MAX_FILES_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing found; `file` is relative to the dataset folder, `code` one of docs/faults.md.

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
    """Return a text from elsewhere, such as a file name, fit for one line of a log (see `escaped`)."""
    return escaped(text)
