"""Programs that outlive who started them, and how they end, on every system.

Windows has neither sessions nor signals for other processes: a program there is kept from the Ctrl-C and
the closing window of its parent by a console and a process group of its own, and `os.kill` ends a
process at once whatever the signal, without its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import psutil

_SIGKILL = 9
_TERMINATED_BY_PSUTIL = 15
"""What psutil and `os.kill` give Windows as the exit code of a process that they end."""
_WINDOWS_FAULTS = 0xC0000000
_WINDOWS_CTRL_C = 0xC000013A


def detached() -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` that keep a program going when its parent ends."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}


def ask_to_end(pid: int) -> None:
    """Ask a program that waits for a command of its own to end that command.

    By SIGTERM, which it hands on. On Windows the command is ended, and its parent writes down how; a
    parent that has not started it yet is ended itself. A process that is gone is left alone.
    """
    with suppress(OSError, psutil.NoSuchProcess):
        if sys.platform != "win32":
            os.kill(pid, signal.SIGTERM)
            return
        parent = psutil.Process(pid)
        for process in parent.children(recursive=True) or [parent]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()


def was_killed(code: int) -> bool:
    """Whether an exit code is that of a program which somebody, or the system, ended at once."""
    on_windows = code == _WINDOWS_CTRL_C or (
        sys.platform == "win32" and code == _TERMINATED_BY_PSUTIL
    )
    return code == -_SIGKILL or on_windows


def end_of(code: int) -> str:
    """Return how a program ended that its own code did not end; empty for an ordinary exit code."""
    if code < 0:
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        return f"was ended by signal {-code}{name}"
    if code == _WINDOWS_CTRL_C:
        return "was ended by Ctrl-C or a closed window"
    if code >= _WINDOWS_FAULTS:  # an NTSTATUS of the severity "error"
        return f"crashed (Windows error 0x{code:08X})"
    return "was ended by another program" if was_killed(code) else ""
