"""Stopping a run: Ctrl-C, SIGTERM, SIGHUP, or a file in its control folder.

After the first request the run finishes its step and saves; the third signal quits at once. Signal handlers
only set a flag, which the training loop reads between steps.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from lora_trainer.common.events import EventStream
from lora_trainer.reporting.control import Control

_ANSWERS = (
    "asked to stop: finishing the step, then saving",
    "still saving; a third signal quits at once, the previous state stays valid",
    "quitting at once",
)


@dataclass
class StopFlag:
    """Holds a stop request until the loop reads it: a signal, control/stop or `is_asked`.

    The third signal quits at once.

    `answers` are messages for the user, put there by handlers and emitted by a thread (`announced`).
    """

    control: Control | None = None
    is_asked: Callable[[], bool] = lambda: False
    answers: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    number: int | None = None
    received: int = 0
    last_s: float = float("-inf")
    clock: Callable[[], float] = time.monotonic

    def __call__(self) -> int | None:
        pending = self.control.pending() if self.control else set[str]()
        if self.control and "stop_now" in pending:
            self.control.done("stop_now")
            self.answers.put(_ANSWERS[2])
            raise KeyboardInterrupt
        if self.control and self.number is None and "stop" in pending:
            self.control.done("stop")
            self.answers.put(_ANSWERS[0])
            self.number = int(signal.SIGTERM)
        if self.number is None and self.is_asked():
            self.number = int(signal.SIGTERM)
        return self.number

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; signals within one second count once, as launchers forward each a second time.

        A closed terminal (SIGHUP, on Windows SIGBREAK) stops the run as SIGTERM does.
        """
        now_s = self.clock()
        if now_s - self.last_s >= 1.0:
            self.received += 1
            self.last_s = now_s
            self.answers.put(_ANSWERS[min(self.received, 3) - 1])
        self.number = number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGTERM
        if self.received >= 3:
            raise KeyboardInterrupt

    @contextmanager
    def announced(self, events: EventStream) -> Iterator[None]:
        """Emit the answers to signals from a thread while the block runs.

        A handler must not emit: it interrupts any code, perhaps a write to the same terminal.
        """

        def announce() -> None:
            while (message := self.answers.get()) is not None:
                fix = "wait a moment; with --resume the run goes on where it stopped"
                phase = "quit" if message == _ANSWERS[2] else "stop"
                events.emit("phase", phase=phase, message=message, done=0, total=0)
                events.problem(message, fix=fix, severity="note", code="CKP-07")

        thread = threading.Thread(target=announce, name="lora-train-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.answers.put(None)
            thread.join()


@contextmanager
def taking_signals(stop: StopFlag) -> Iterator[None]:
    """Let `stop` handle the signals that end a run while the block runs.

    Python lets only the main thread handle signals; elsewhere they stay with the program that trains.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop.handle) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop_signals() -> list[int]:
    """Return the signals that stop a run, without a SIGHUP that `nohup` made ignored."""
    stopping: list[int] = [signal.SIGINT, signal.SIGTERM]
    # POSIX has SIGHUP; Windows has SIGBREAK, for Ctrl-Break and a window that is being closed.
    for name in ("SIGHUP", "SIGBREAK"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            stopping.append(number)
    return stopping
