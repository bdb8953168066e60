"""Requests to a run that trains: files in its folder control/, and signals that stop it.

Inputs: what somebody asks of a run: Ctrl-C, SIGTERM, SIGHUP, or a file from the interface or made by hand.
Outputs: the requests that wait, which the training loop reads between steps. After the first request to stop,
the run finishes its step and saves; the third signal quits at once. The files `stop`, `stop_now` and `save` are
empty. `sample` may hold a prompt as UTF-8 text; an empty one, the only kind of version 0.2, asks for images of the
run's own prompts.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from stat import S_ISREG
from types import FrameType
from typing import Literal, get_args

from lora_trainer.common.errors import RequestError
from lora_trainer.common.event_kinds import Event, Finished, Phase
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import disk_error, open_regular, retry_while_open, write_atomic
from lora_trainer.common.wording import without_secrets

_ANSWERS = (
    "asked to stop: finishing the step, then saving",
    "still saving; a third signal quits at once, the previous state stays valid",
    "quitting at once",
)


@dataclass
class StopFlag:
    """Holds a stop request until the loop reads it: a signal, control/stop or `is_asked`.

    The third signal quits at once.
    """

    control: Control | None = None
    is_asked: Callable[[], bool] = lambda: False
    answers: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    """Messages for the user, put here by signal handlers and emitted by a thread (`announced`)."""
    number: int | None = None
    received: int = 0
    last_s: float = float("-inf")

    def __call__(self) -> int | None:
        if self._obeys("stop_now", _ANSWERS[2]):
            raise KeyboardInterrupt
        if self.number is None and (self._obeys("stop", _ANSWERS[0]) or self.is_asked()):
            self.number = int(signal.SIGTERM)
        return self.number

    def _obeys(self, request: Request, answer: str) -> bool:
        """Whether a file in control/ asks for it; the file is removed and answered."""
        if self.control is None or self.control.asked_at_s(request) is None:
            return False
        self.control.done(request)
        self.answers.put(answer)
        return True

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; signals within one second count once, as launchers forward each a second time.

        A closed terminal (SIGHUP, on Windows SIGBREAK) stops the run as SIGTERM does.
        """
        now_s = time.monotonic()
        # Session managers repeat the signal of a terminal that is closed: nobody is impatient.
        is_repeated = self.received > 0 and number == getattr(signal, "SIGHUP", None)
        if now_s - self.last_s >= 1.0 and not is_repeated:
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
                events.emit(Phase(phase=phase, message=message, done=0, total=0))
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
    # POSIX has SIGHUP; Windows has SIGBREAK, for Ctrl-Break and a window that is being closed.
    closed = (getattr(signal, name, None) for name in ("SIGHUP", "SIGBREAK"))
    # `nohup` makes SIGHUP ignored.
    heard = (n for n in closed if n is not None and signal.getsignal(n) is not signal.SIG_IGN)
    numbers = (signal.SIGINT, signal.SIGTERM, *heard)
    previous = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Quit(KeyboardInterrupt):
    """A signal that ends the program where no run handles it; `number` is that of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass
class Quitting:
    """Raises Quit at SIGTERM and at a closed terminal; a listener, as nothing is stopped once the run has finished.

    Without a handler the system ends the program, or does nothing where it is the first process of a container.
    """

    is_finished: bool = False

    def __call__(self, event: Event) -> None:
        self.is_finished = self.is_finished or isinstance(event, Finished)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.is_finished:
            raise Quit(number)

    def begin(self) -> None:
        """Handle the signals of which nobody has decided yet; `nohup` has, of SIGHUP."""
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self.handle)


Request = Literal["stop", "stop_now", "save", "sample"]

MAX_PROMPT_CHARACTERS = 2_000


def _checked_prompt(text: str) -> str:
    """Return a prompt that somebody wrote as one line; raises RequestError.

    Prompts appear in reports and image files, so secrets are removed.
    """
    prompt = " ".join(text.split())
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            f"the prompt has {len(prompt):,} characters, at most {MAX_PROMPT_CHARACTERS:,} are allowed",
            fix="shorten it",
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in prompt):
        raise RequestError(
            "the prompt holds a control character or half a character", fix="type it again"
        )
    return without_secrets(prompt)


@dataclass(frozen=True)
class Control:
    """Requests to a running trainer: one file each in the run's control folder."""

    run_folder: Path

    @property
    def folder(self) -> Path:
        return self.run_folder / "control"

    def pending(self) -> set[Request]:
        """Return the requests that wait; files of other names are not requests."""
        return {name for name in get_args(Request) if self.asked_at_s(name) is not None}

    def done(self, name: str) -> None:
        """Remove a request that was obeyed."""
        retry_while_open(lambda: (self.folder / name).unlink(missing_ok=True))

    def forget_before(self, time_s: float) -> None:
        """Remove requests from before `time_s`: they were meant for a process that was killed."""
        for name in get_args(Request):
            asked_s = self.asked_at_s(name)
            if asked_s is not None and asked_s < time_s:
                with suppress(OSError):
                    (self.folder / name).unlink()

    def asked_at_s(self, name: Request) -> float | None:
        """Return when a request that waits was made, None if none does; nothing but a file is one."""
        try:
            found = (self.folder / name).stat()
        except OSError:
            return None
        return found.st_mtime if S_ISREG(found.st_mode) else None

    def request(self, name: Request, *, prompt: str = "") -> None:
        """Ask the run that trains in this folder for something; raises MachineError.

        `prompt` is for sample images; it raises RequestError where it is too long or no text.
        """
        data = _checked_prompt(prompt).encode()
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(self.folder, error) from error
        # Renamed into place: the trainer must not read a prompt that is half there.
        write_atomic(self.folder / name, data, durable=False)

    def take_samples(self) -> str | None:
        """Return the prompt of a request for sample images and remove the request, None if none waits.

        "" stands for the run's own prompts. Raises RequestError for a file that holds no prompt; it is removed too.
        """
        if self.asked_at_s("sample") is None:
            return None
        try:
            with TextIOWrapper(
                open_regular(self.folder / "sample"), encoding="utf-8-sig"
            ) as opened:
                # More than is allowed, which is then refused; never all of an endless file. In
                # characters: a bound in bytes would cut one in two.
                text = opened.read(4 * MAX_PROMPT_CHARACTERS)
        except OSError as error:
            raise RequestError(
                f"the request for sample images cannot be read: {error.strerror or error}",
                fix="ask again",
            ) from error
        except UnicodeDecodeError:
            raise RequestError(
                "the request for sample images is not UTF-8 text",
                fix=f"write a prompt of at most {MAX_PROMPT_CHARACTERS:,} characters into it",
            ) from None
        finally:
            self.done("sample")
        return _checked_prompt(text)
