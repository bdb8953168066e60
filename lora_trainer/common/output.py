"""Standard output and standard error that outlast their terminal, pipe or disk.

A terminal is closed, the reader of a pipe ends (`| head -3`), the disk of a log is full: writing then raises in
whatever code happens to print, a library's warning or Python's own flush at exit. Here the bytes go through an
`Outlet`, which never raises: what cannot be written is lost, and why is remembered. While a training runs, a thread
beside it writes (`output_aside`), because a terminal that is held (Ctrl-S) or a pager that waits must not hold it.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Literal, cast

# A pipe that is ready takes this many bytes without waiting (POSIX: PIPE_BUF).
_AT_ONCE_BYTES = 4096
_POLL_MS = 100
# What waits for a blocked reader; a run says about 100 bytes every 30 s.
_MOST_WAITING_BYTES = 1 << 20
# At the end of a run a reader that takes nothing for so long is left.
PATIENCE_S = 5.0


class Outlet(io.RawIOBase):
    """The descriptor of a stream; `error` is why bytes were lost, None while all could be written."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._is_left = False
        self.error: OSError | None = None
        self.aside: _Aside | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        try:
            return self._raw.isatty()
        except OSError:
            return False

    def write(self, data: bytes | memoryview | bytearray, /) -> int:  # type: ignore[override]  # the buffer protocol of typeshed
        """Write all of it, now or in the thread beside the training; never raises."""
        content = bytes(data)
        if self.aside is not None:
            self.aside.put(self, content)
        else:
            self.send(content)
        return len(content)

    def send(self, data: bytes) -> None:
        """Write to the descriptor, waiting for its reader; returns early once that is left."""
        rest = memoryview(data)
        try:
            while rest and not self._is_left and self._is_ready():
                # None: somebody who shares the terminal has made it non-blocking, and it is full.
                rest = rest[self._raw.write(rest[:_AT_ONCE_BYTES]) or 0 :]
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self.error = error if isinstance(error, OSError) else OSError(str(error))

    def _is_ready(self) -> bool:
        """Wait until the reader takes bytes; False once it is left."""
        if not hasattr(select, "poll"):  # Windows
            return True
        poll = select.poll()
        poll.register(self._raw.fileno(), select.POLLOUT)
        while not self._is_left:
            if poll.poll(_POLL_MS):
                return True
        return False

    def leave(self) -> None:
        """Write nothing any more: its reader does not read."""
        self._is_left = True
        self.error = self.error or TimeoutError("its reader does not read")


class _Aside:
    """The thread that writes for both streams, in the order in which they were written to."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Outlet, bytes]] = deque()
        self._bytes = self._left_out = self._written = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="lora-train-output", daemon=True)
        self._thread.start()

    def put(self, outlet: Outlet, data: bytes) -> None:
        with self._changed:
            if self._bytes + len(data) > _MOST_WAITING_BYTES:
                self._left_out += data.count(b"\n")
                return
            if self._left_out:
                note = f"[{self._left_out} lines are left out, as nobody read them]\n".encode()
                self._waiting.append((outlet, note))
                self._bytes += len(note)
                self._left_out = 0
            self._waiting.append((outlet, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_over:
                        return
                    self._changed.wait()
                outlet, data = self._waiting[0]
            outlet.send(data)
            with self._changed:
                # Removed only now: whoever waits for an empty queue waits for the write.
                self._waiting.popleft()
                self._bytes -= len(data)
                self._written += 1
                self._changed.notify_all()

    def drain(self, *, patience_s: float) -> None:
        """Return when all is written; a reader that takes nothing for `patience_s` is left."""
        with self._changed:
            while self._waiting:
                before = self._written
                if not self._changed.wait(patience_s) and self._written == before:
                    self._waiting[0][0].leave()
                    if not self._changed.wait(patience_s):
                        return  # inside a write that does not come back

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def outlast(name: Literal["stdout", "stderr"]) -> None:
    """Put an `Outlet` into `sys.stdout` or `sys.stderr`; what it cannot encode is escaped.

    A stream that somebody has put there, as a test does, only gets the escapes.
    """
    stream = getattr(sys, name)
    if stream is None:  # its descriptor is closed (`>&-`)
        _occupy_standard_descriptors()
        stream = open(os.devnull, "w", encoding="utf-8", newline="\n")  # noqa: SIM115, PTH123 - for the whole program
        setattr(sys, name, stream)
        return
    if not isinstance(stream, io.TextIOWrapper):
        return
    encoding, newline = stream.encoding, None
    if sys.platform == "win32" and not stream.isatty():
        # Logs are read as UTF-8; a pipe or file has the code page of the system, as cp1252.
        encoding, newline = "utf-8", "\n"
    # What a terminal or a pipe cannot show, such as a file's name, is escaped and ends no run.
    if stream is not getattr(sys, f"__{name}__"):
        stream.reconfigure(errors="backslashreplace")
        return
    with suppress(OSError):
        stream.flush()
    raw = getattr(stream.buffer, "raw", stream.buffer)
    lasting = io.TextIOWrapper(
        cast(BinaryIO, Outlet(raw)),
        encoding=encoding,
        errors="backslashreplace",
        newline=newline,
        write_through=True,
    )
    setattr(sys, name, lasting)


def _occupy_standard_descriptors() -> None:
    """Open the null device at each closed one of 0, 1 and 2: else a file of a run would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _outlets() -> list[Outlet]:
    buffers = (getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr))
    return [buffer for buffer in buffers if isinstance(buffer, Outlet)]


def lost_output(name: Literal["stdout", "stderr"] = "stdout") -> OSError | None:
    """Return why bytes of a stream were lost, None if none were."""
    buffer = getattr(getattr(sys, name), "buffer", None)
    return buffer.error if isinstance(buffer, Outlet) else None


@contextmanager
def output_aside() -> Iterator[None]:
    """Let a thread write both streams while the block runs, so that no reader can delay it."""
    outlets = _outlets()
    if not outlets:
        yield
        return
    aside = _Aside()
    for outlet in outlets:
        outlet.aside = aside
    try:
        yield
        aside.drain(patience_s=PATIENCE_S)
    except Exception:
        aside.drain(patience_s=PATIENCE_S)
        raise
    finally:  # at once where somebody quits at once
        for outlet in outlets:
            outlet.aside = None
        aside.end()


def say_last(line: str) -> None:
    """Write a line to stderr before the program ends at once; never raises."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line)
        sys.stderr.flush()
    for outlet in _outlets():
        if outlet.aside is not None:
            outlet.aside.drain(patience_s=1.0)
