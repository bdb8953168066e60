"""Sees when another process of a training has died, frozen or failed, and ends this one with the reason.

Every process keeps a heartbeat in the launcher's key-value store and looks at those of the others from
a thread of its own, because its main thread may wait in a collective for ever. What followers have to
say reaches the leader the same way. Nothing here is a collective.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # torch lists no exports

from lora_trainer.errors import RESUME, MachineError
from lora_trainer.events import Event, EventStream
from lora_trainer.launch import Place

INTERVAL_S = 0.5
GRACE_S = 5.0
"""What the main thread has to end by itself, with the reason, before it is ended."""
LOOK = f"look at what that process said, then {RESUME}"
STORE_GONE = "the process that kept the launcher's store ended"


def _is_local(event: Event) -> bool:
    """Whether an event belongs into the records of the run although the leader has not seen it.

    What the guards decide (TRN-01) follows from the same numbers everywhere: the leader says it.
    """
    match event.kind:
        case "out_of_memory":
            return True
        case "problem":
            return bool(event.fields["code"] != "TRN-01")
        case "change":
            return str(event.fields["key"]).startswith("memory.")
    return False


@dataclass(kw_only=True)
class _Seen:
    """A heartbeat as it was last seen to change, by this machine's clock."""

    beat: bytes
    at_s: float


@dataclass(kw_only=True)
class Watch:
    """A thread beside the training; `timeout_s` is how long a process may be silent.

    `on_end(reason)` writes down why, just before this process is ended for another's sake.
    """

    place: Place
    store: Store
    timeout_s: float
    on_end: Callable[[str], None] = lambda reason: None
    clock: Callable[[], float] = time.monotonic
    _started_s: float = 0.0
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _told: dict[int, int] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _events: EventStream | None = None

    def start(self) -> None:
        """Say who this is and begin to watch."""
        self._started_s = self.clock()
        me = psutil.Process()
        about = {"host": socket.gethostname(), "pid": me.pid, "started_s": me.create_time()}
        self.store.set(f"about/{self.place.rank}", json.dumps(about))
        self._beat(0)
        self._thread = threading.Thread(target=self._work, name="lora-train-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; this process has done its part and may be silent from now on.

        Who keeps the store waits a moment for the others, who still ask it why they end.
        """
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(RuntimeError):
            self.store.set(f"beat/{self.place.rank}", "done")
            until_s = self.clock() + GRACE_S
            keeps = self.place.leads and not self.place.launcher_keeps_store
            while keeps and self.clock() < until_s and not all(map(self._has_left, self._others())):
                time.sleep(INTERVAL_S / 10)

    def _others(self) -> Iterator[int]:
        yield from (rank for rank in range(self.place.count) if rank != self.place.rank)

    def _has_left(self, rank: int) -> bool:
        if not self.store.check([f"beat/{rank}"]):
            return True
        return bool(self.store.get(f"beat/{rank}") == b"done") or self._is_dead(rank)

    def record(self, events: EventStream) -> None:
        """Take what followers tell into the records of the run (the leader calls this)."""
        self._events = events

    def tell(self, event: Event) -> None:
        """Listener of a follower's events: hand the leader what only happened here."""
        if _is_local(event):
            number = self._told.get(self.place.rank, 0)
            row = {"kind": event.kind, "fields": dict(event.fields)}
            self.store.set(f"told/{self.place.rank}/{number}", json.dumps(row))
            self._told[self.place.rank] = number + 1

    def fail(self, reason: str) -> None:
        """Say that this process ends and why; the first reason is the one that counts."""
        with suppress(RuntimeError):
            self.store.compare_set("failed", "", f"process {self.place.rank}: {reason}")

    def wait_for_all(self, what: str) -> None:
        """Return when every process has called this with `what`; raises MachineError if one has ended."""
        self.store.set(f"{what}/{self.place.rank}", "1")
        for rank in range(self.place.count):
            self.take(f"{what}/{rank}")

    def give(self, what: str, value: str) -> None:
        """Put a text where the others can take it."""
        self.store.set(what, value)

    def take(self, what: str) -> str:
        """Return the text somebody gives, when it is there; raises MachineError if one has ended."""
        try:
            while not self.store.check([what]):
                if found := self._failure():
                    raise MachineError(found, fix=LOOK)
                time.sleep(INTERVAL_S / 5)
            return str(self.store.get(what).decode())
        except RuntimeError as error:
            raise MachineError(STORE_GONE, fix=LOOK) from error

    def reason(self) -> str:
        """Return why another process ended, as soon as that is known; empty when nobody knows."""
        deadline_s = self.clock() + GRACE_S / 2
        while self.clock() < deadline_s:
            try:
                found = self._failure()
            except RuntimeError:
                return STORE_GONE
            if found:
                return found
            time.sleep(INTERVAL_S / 5)
        return ""

    # ---- the thread

    def _work(self) -> None:
        number = 0
        while not self._done.wait(INTERVAL_S):
            number += 1
            try:
                self._beat(number)
                self._listen()
                found = self._failure()
            except RuntimeError:
                found = STORE_GONE
            if found:
                self._end(found)

    def _beat(self, number: int) -> None:
        self.store.set(f"beat/{self.place.rank}", str(number))

    def _listen(self) -> None:
        if self._events is None:
            return
        for rank in range(1, self.place.count):
            while self.store.check([key := f"told/{rank}/{self._told.get(rank, 0)}"]):
                row = json.loads(self.store.get(key))
                fields = dict(row["fields"])
                for name in {"what", "reason"} & fields.keys():
                    fields[name] = f"process {rank}: {fields[name]}"
                self._events.emit(row["kind"], **fields)
                self._told[rank] = self._told.get(rank, 0) + 1

    def _failure(self) -> str:
        if self.store.check(["failed"]):
            told = self.store.get("failed").decode()
            return "" if told.startswith(f"process {self.place.rank}:") else told
        for rank in self._others():
            if found := self._looked_at(rank):
                return found
        return ""

    def _looked_at(self, rank: int) -> str:
        """Return what is wrong with a process, empty while nothing is."""
        now_s = self.clock()
        if not self.store.check([f"beat/{rank}"]):
            late = now_s - self._started_s >= self.timeout_s
            return f"process {rank} of {self.place.count} never came" if late else ""
        beat = self.store.get(f"beat/{rank}")
        if beat == b"done":
            return ""
        if self._is_dead(rank):
            return f"process {rank} of {self.place.count} was killed or crashed"
        seen = self._seen.get(rank)
        if seen is None or seen.beat != beat:
            self._seen[rank] = _Seen(beat=beat, at_s=now_s)
            return ""
        if now_s - seen.at_s < self.timeout_s:
            return ""
        return f"process {rank} of {self.place.count} has been silent for {now_s - seen.at_s:.0f} s"

    def _about(self, rank: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.store.get(f"about/{rank}"))
        return found

    def _is_dead(self, rank: int) -> bool:
        """Whether a process on this machine is gone; others are known by their heartbeat only."""
        about = self._about(rank)
        if about["host"] != socket.gethostname():
            return False
        try:
            process = psutil.Process(about["pid"])
            another = abs(process.create_time() - float(about["started_s"])) > 1.0
            return bool(another or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _end(self, reason: str) -> None:
        """Give the main thread a moment to end by itself, then end everything here at once."""
        if self._done.wait(GRACE_S):
            return
        self.on_end(reason)
        sys.stderr.write(f"error: {reason}. Fix: {LOOK}.\n")
        sys.stderr.flush()
        self._end_frozen()
        os._exit(MachineError.exit_code)

    def _end_frozen(self) -> None:
        """Kill silent processes of this machine: a stopped one would not hear the launcher's signal."""
        for rank, seen in self._seen.items():
            about = self._about(rank)
            if (
                about["host"] == socket.gethostname()
                and self.clock() - seen.at_s >= self.timeout_s
                and not self._is_dead(rank)
            ):
                with suppress(ProcessLookupError):
                    os.kill(about["pid"], signal.SIGKILL)
