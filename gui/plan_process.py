"""Commands answered by a process that has everything imported already: `plan` and `check`.

A command line of its own takes over a second to import what it needs, each time a choice changes. The
process reads one command a line, a JSON list of words, and answers with one line of JSON: exit code,
output, errors. It ends with the process that started it, whose end closes its input.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lora_trainer.common.processes import detached
from lora_trainer.queue.rules import is_offline

from .bases import releases

# What is asked for the public releases: no command of its own, for it serves these pages alone.
BASES = ("bases",)


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: bytes
    stderr: bytes


@dataclass(kw_only=True)
class PlanProcess:
    """One process, started when it is first needed and anew when it has ended; one command at a time."""

    within_s: float
    _process: subprocess.Popen[bytes] | None = None
    _is_offline: bool = field(default_factory=lambda: is_offline(os.environ))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, words: Sequence[str]) -> Done:
        """Run a command; raises OSError when the process did not answer."""
        with self._lock:
            process = self._alive()
            # A command that does not end takes its process with it, and the next one gets another.
            too_late = threading.Timer(self.within_s, process.kill)
            too_late.start()
            try:
                return _asked(process, words)
            finally:
                too_late.cancel()

    def start(self, words: Sequence[str]) -> None:
        """Run a command for what it imports, so that the first one that matters has no imports to wait for."""
        with contextlib.suppress(OSError):  # said by the command that needs it
            self.run(words)

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._is_offline != is_offline(os.environ):
            self._process.kill()  # it has read at its start whether it may download
            self._process.wait()
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._is_offline = is_offline(os.environ)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lora_trainer.gui.plan_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                **detached(),  # a Ctrl-C meant for the interface does not reach it
            )
        return self._process


def _asked(process: subprocess.Popen[bytes], words: Sequence[str]) -> Done:
    if process.stdin is None or process.stdout is None:
        raise AssertionError("the process was started with pipes")
    process.stdin.write(json.dumps(list(words)).encode() + b"\n")
    process.stdin.flush()
    try:
        answer = json.loads(process.stdout.readline())
    except ValueError:  # nothing, or a line that is none of ours or cut short
        process.kill()  # else its next line would be taken for the answer to another command
        process.wait()
        raise OSError("the command ended without an answer") from None
    return Done(
        returncode=answer["code"],
        stdout=answer["out"].encode("utf-8", "replace"),
        stderr=answer["err"].encode("utf-8", "replace"),
    )


def serve() -> None:
    """Answer the commands of the input until it ends."""
    # What a library prints by itself, be it while it is imported, must not stand between the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    from lora_trainer.cli import main

    for line in sys.stdin.buffer:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _code(main, json.loads(line))
        answer = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        answers.write(json.dumps(answer).encode() + b"\n")


def _code(main: Any, words: list[str]) -> int:
    if words == list(BASES):
        sys.stdout.write(json.dumps({"releases": releases()}))
        return 0
    try:
        return cast(int, main.run(words))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


if __name__ == "__main__":
    serve()
