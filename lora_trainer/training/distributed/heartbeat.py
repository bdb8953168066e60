"""Notices when another process of a training has died, frozen or failed, or when this one hangs at start.

torch's launcher ends the processes of one machine when one of them exits, and a collective raises when a
connection closes. This module covers the cases that neither notices or explains:

* a frozen process or a machine that is switched off: no connection closes, and collectives wait for ever;
* a start that hangs in one process (a library that waits for the others, a network that refuses);
* the reason: the launcher's log has only an exit code, and the other processes get SIGTERM, which looks
  like a stop by the user.

Each process writes a heartbeat to the launcher's key-value store and reads the heartbeats of the others
from a thread of its own, because its main thread may wait in a collective for ever. Followers send their
events to the leader through the same store. Nothing here is a collective.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # torch lists no exports

import lora_trainer
from lora_trainer.common.errors import RESUME, MachineError
from lora_trainer.common.event_kinds import Change, Event, OutOfMemory, Problem, event_of_row
from lora_trainer.common.events import EventStream
from lora_trainer.common.output import say_last
from lora_trainer.common.processes import DistEnv

INTERVAL_S = 0.5
# Time that the main thread has to end the process itself, with the reason, before this thread does.
GRACE_S = 5.0
CONNECT = "if the machine has several network interfaces, set NCCL_SOCKET_IFNAME (on CPU: GLOO_SOCKET_IFNAME)"
LOOK = f"look at what that process said, then {RESUME}"
STORE_GONE = "the process that kept the launcher's store ended"
# Share of one core: a download or a checksum uses more, a waiting thread uses none.
_WORKING_SHARE = 0.01
_WORKING_BYTES = 1_000_000


def work_so_far() -> tuple[float, int]:
    """Return the processor seconds of all threads but the calling one, and the bytes read and written."""
    try:
        counted = psutil.Process().io_counters()
        stored_bytes = int(counted.read_bytes + counted.write_bytes)
    except (psutil.Error, OSError, NotImplementedError, AttributeError):  # macOS has no such call
        stored_bytes = 0
    return time.process_time() - time.thread_time(), stored_bytes


@dataclass(kw_only=True)
class PeerMonitor:
    """A thread that watches the other processes; `timeout_s` limits silence, and idleness at the start.

    `on_end(reason)` records the reason just before the thread ends this process. `events`, which only the leader
    sets, get the events of followers. `is_starting` until this process is connected, and may wait for as long as
    others work; connecting, from `connecting_since_s` on, may take `timeout_s`.
    """

    dist_env: DistEnv
    store: Store
    timeout_s: float
    on_end: Callable[[str], None] = lambda reason: None
    events: EventStream | None = None
    is_starting: bool = True
    connecting_since_s: float | None = None
    _began_s: float = 0.0
    _worked: tuple[float, float, int] | None = None
    """When this process last worked while starting, and its work until then."""
    _waiting: bool = False
    _last_beats: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """A process's heartbeat, and the time by this machine's clock at which it last changed: clocks of several
    machines differ, so a heartbeat is a counter and holds no time."""
    _rows: Counter[int] = field(default_factory=Counter)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Publish this process's host, pid and start time, and start the thread."""
        self._began_s = time.monotonic()
        me = psutil.Process()
        about = {"host": socket.gethostname(), "pid": me.pid, "started_s": me.create_time()}
        self.store.set(f"about/{self.dist_env.rank}", json.dumps(about))
        self.store.set(f"beat/{self.dist_env.rank}", "0")
        self._thread = threading.Thread(target=self._work, name="lora-train-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and mark this process as done, so that its silence is not a failure.

        The process that hosts the store waits a moment before it exits, because the others still read the
        reason of their end from it; for processes that have not come yet it waits up to `timeout_s`.
        """
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(RuntimeError):
            self.store.set(f"beat/{self.dist_env.rank}", "done")
            until_s = max(time.monotonic() + GRACE_S, self._began_s + self.timeout_s)
            keeps = self.dist_env.is_main and not self.dist_env.launcher_keeps_store
            staying = self._others() if keeps else []
            while staying and time.monotonic() < until_s:
                rank = staying[0]
                # Without a heartbeat the process may still be starting.
                if self.store.check([f"beat/{rank}"]) and (
                    self.store.get(f"beat/{rank}") == b"done" or self._is_dead(rank)
                ):
                    staying.pop(0)
                else:
                    time.sleep(INTERVAL_S / 10)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.dist_env.count) if rank != self.dist_env.rank]

    def tell(self, event: Event) -> None:
        """Send the leader an event of this follower that concerns only this process (a listener).

        Each event gets a numbered key, because torch's store has no queues on Windows.
        """
        # Guards decide (TRN-01) by numbers that are the same on all processes: the leader reports those itself.
        if (
            isinstance(event, OutOfMemory)
            or (isinstance(event, Problem) and event.code != "TRN-01")
            or (isinstance(event, Change) and event.key.startswith("memory."))
        ):
            rank, row = self.dist_env.rank, {"event": event.kind, **event.fields}
            self.store.set(f"row/{rank}/{self._rows[rank]}", json.dumps(row))
            self._rows[rank] += 1

    def fail(self, reason: str) -> None:
        """Publish that this process ends and why; only the first reason of all processes is kept."""
        with suppress(RuntimeError):
            self.store.compare_set("failed", "", f"process {self.dist_env.rank}: {reason}")

    def wait_for_all(self, name: str) -> None:
        """Return once every process has called this with `name`; raises MachineError if one has ended."""
        self.store.set(f"{name}/{self.dist_env.rank}", "1")
        for rank in range(self.dist_env.count):
            self.take(f"{name}/{rank}")

    def take(self, key: str) -> str:
        """Wait for the text published under `key`; raises MachineError if a process has ended.

        Polls the store, because the store's own `wait` does not notice that a process has ended.
        """
        self._waiting = True
        try:
            while not self.store.check([key]):
                if reason := self._failure():
                    raise MachineError(reason, fix=LOOK)
                time.sleep(INTERVAL_S / 5)
            return str(self.store.get(key).decode())
        except RuntimeError as error:
            raise MachineError(STORE_GONE, fix=LOOK) from error
        finally:
            self._waiting = False

    def reason(self) -> str:
        """Return why another process ended, waiting up to GRACE_S / 2 for the reason; empty if unknown."""
        until_s = time.monotonic() + GRACE_S / 2
        while time.monotonic() < until_s:
            try:
                reason = self._failure()
            except RuntimeError:
                return STORE_GONE
            if reason:
                return reason
            time.sleep(INTERVAL_S / 5)
        return ""

    # ---- the thread

    def _work(self) -> None:
        number = 0
        while not self._done.wait(INTERVAL_S):
            number += 1
            try:
                self.store.set(f"beat/{self.dist_env.rank}", str(number))
                self._relay()
                reason = self._failure()
                if not reason and (own_failure := self._overdue()):
                    self.fail(own_failure)
                    reason = f"process {self.dist_env.rank}: {own_failure}"
            except RuntimeError:
                reason = STORE_GONE
            if reason:
                self._end(reason)

    def _relay(self) -> None:
        """Emit the events that followers have sent since the last time, where they are recorded."""
        for rank in range(1, self.dist_env.count if self.events is not None else 0):
            while self.store.check([key := f"row/{rank}/{self._rows[rank]}"]):
                event = event_of_row(json.loads(self.store.get(key)))
                assert self.events is not None
                match event:
                    case Problem():
                        self.events.emit(replace(event, what=f"process {rank}: {event.what}"))
                    case OutOfMemory() | Change():
                        self.events.emit(replace(event, reason=f"process {rank}: {event.reason}"))
                self._rows[rank] += 1

    def _limit_text(self) -> str:
        return f"hardware.process_timeout_s={self.timeout_s:g}"

    def _overdue(self) -> str:
        """Return a sentence if this process hangs in its start, else an empty string."""
        if self._waiting or not self.is_starting:
            self._worked = None  # measured anew afterwards
            return ""
        if self.connecting_since_s is not None:
            if time.monotonic() - self.connecting_since_s < self.timeout_s:
                return ""
            limit = self._limit_text()
            return f"connecting to the other processes takes longer than {limit}: {CONNECT}"
        idle_s = self.idle_s()
        if idle_s < self.timeout_s:
            return ""
        # The line the main thread is at, and the line of this package that called into it.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
        ours = str(Path(lora_trainer.__file__).parent)
        lines = [*calls[:1], *[call for call in calls if call.filename.startswith(ours)][:1]]
        places = dict.fromkeys(f"{Path(c.filename).name}:{c.lineno} ({c.name})" for c in lines)
        return (
            f"did nothing for {idle_s:.0f} s while starting ({self._limit_text()}); "
            f"it waits in {', called by '.join(places)}"
        )

    def idle_s(self) -> float:
        """Return the seconds since this process last worked while starting.

        It worked if since then it used a hundredth of `timeout_s` in processor time, or a megabyte of I/O. A
        start has no time limit, as downloading or hashing a base may take an hour. A process that waits for
        something that never comes uses no processor and no disk, and is recognised by that.
        """
        work = (time.monotonic(), *work_so_far())
        before = self._worked or work
        idle_s, computed_s, stored_bytes = (
            now - then for now, then in zip(work, before, strict=True)
        )
        if computed_s >= _WORKING_SHARE * self.timeout_s or stored_bytes >= _WORKING_BYTES:
            before, idle_s = work, 0.0
        self._worked = before
        return idle_s

    def _failure(self) -> str:
        if self.store.check(["failed"]):
            reason = self.store.get("failed").decode()
            return "" if reason.startswith(f"process {self.dist_env.rank}:") else reason
        return next(filter(None, map(self._missing, self._others())), "")

    def _missing(self, rank: int) -> str:
        """Return the failure of process `rank`, empty while it is alive."""
        now_s, name = time.monotonic(), f"process {rank} of {self.dist_env.count}"
        if not self.store.check([f"beat/{rank}"]):
            late = now_s - self._began_s >= self.timeout_s
            return f"{name} never came within {self._limit_text()}" if late else ""
        beat = self.store.get(f"beat/{rank}")
        if beat == b"done":
            return ""
        if self._is_dead(rank):
            return f"{name} was killed or crashed"
        last_beat, at_s = self._last_beats.get(rank, (b"", now_s))
        if last_beat != beat:
            self._last_beats[rank] = beat, now_s
            return ""
        silent_s = now_s - at_s
        return f"{name} has been silent for {silent_s:.0f} s" if silent_s >= self.timeout_s else ""

    def _is_dead(self, rank: int) -> bool:
        """Say whether a process of this machine is gone; for other machines only heartbeats can tell."""
        about: Mapping[str, Any] = json.loads(self.store.get(f"about/{rank}"))
        if about["host"] != socket.gethostname():
            return False
        try:
            process = psutil.Process(about["pid"])
            # Systems reuse pids: another start time means another process.
            another = abs(process.create_time() - float(about["started_s"])) > 1.0
            return bool(another or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _end(self, reason: str) -> None:
        """Give the main thread GRACE_S to end by itself, then end this process at once.

        A frozen process is left to the launcher, which kills processes that do not react to its SIGTERM.
        """
        if self._done.wait(GRACE_S):
            return
        try:
            self.on_end(reason)
            say_last(f"error: {reason}. Fix: {LOOK}.\n")
        finally:
            # The main thread may be inside a collective that never returns: `sys.exit` here would end only
            # this thread, and an ordinary exit would wait for it.
            os._exit(MachineError.exit_code)
