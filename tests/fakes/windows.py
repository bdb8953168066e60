"""Windows as far as this machine can play it: its files, names and processes.

Only calls from this project's own modules meet it (the frame of the caller decides): libraries have
their own code for Windows. `on_windows()` is a context manager, and `python -m tests.fakes.windows
LINE...` runs command lines under it, each a JSON list of words. What it plays, with the source:

- `os.open` without `O_BINARY` is refused: it would translate "\n" to "\r\n" and end at Ctrl-Z (Microsoft, `_open`);
- a file that is open or mapped can be neither replaced, renamed nor removed, nor a folder around it
  (files are opened without FILE_SHARE_DELETE); `os.rename` onto an existing file fails (Python, `os.rename`);
- a folder cannot be opened, and `fsync` needs a file that may be written (FlushFileBuffers);
- names with <>:"|?*, those of devices, and those that end in a dot or space are refused or changed;
- `os.kill` ends a process at once whatever the signal (Python, `os.kill`); `start_new_session` does nothing,
  `creationflags` does.

Names that Windows lacks and text files without `encoding` are found in the code itself (tests/common/test_windows.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sys import _getframe
from types import FrameType, ModuleType
from typing import Any

import pytest

from lora_trainer.common import files

O_BINARY = 0x8000
_NEW_PROCESS_GROUP, _NO_WINDOW = 0x200, 0x08000000


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the code that asked is this project's; what only passes a call on is looked past."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in {"pathlib", "shutil", "os", "contextlib", "tests"}:
            return name in ("lora_trainer", "gui", "presets")
        frame = frame.f_back
    return False


def _check_name(path: Any) -> None:
    """Raise OSError for a name that Windows refuses, or would silently change."""
    parts = () if isinstance(path, int) else Path(os.fsdecode(path)).parts
    for part in parts:
        if part not in (os.sep, ".", "..") and (why := files.windows_name_problem(part)):
            raise OSError(errno.EINVAL, why, part)


def _refuse_held(*paths: Any) -> None:
    """Raise PermissionError for a file that this process has open or mapped, or a folder around one."""
    held = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            held.add(str(descriptor.readlink()))
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        held.add(line[73:])
    for path in paths:
        real = os.path.realpath(os.fsdecode(path))
        is_held = real in held or any(name.startswith(f"{real}{os.sep}") for name in held)
        if os.path.lexists(path) and is_held:
            why = "The process cannot access the file because it is being used by another process"
            raise PermissionError(errno.EACCES, why, os.fsdecode(path))


class _WindowsSys(ModuleType):
    """`sys`, whose `platform` is that of Windows for our code."""

    def __getattribute__(self, name: str) -> Any:
        if name == "platform" and _is_ours(_getframe(1)):
            return "win32"
        return ModuleType.__getattribute__(self, name)


@contextmanager
def on_windows() -> Iterator[list[dict[str, Any]]]:
    """Play Windows while the block runs; give the arguments of every process our code starts."""
    started: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        _play_files(patch)
        _play_processes(patch, started)
        patch.setattr(sys, "__class__", _WindowsSys)
        yield started


def _play_files(patch: pytest.MonkeyPatch) -> None:
    real_open, real_fsync, real_rename, real_mkdir = os.open, os.fsync, os.rename, os.mkdir

    def open_descriptor(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if _is_ours(_getframe(1)):
            _check_name(path)
            if Path(path).is_dir():
                raise PermissionError(errno.EACCES, "Permission denied", os.fsdecode(path))
            assert flags & O_BINARY, f"{path} is opened in text mode"
        return real_open(path, flags & ~O_BINARY, *rest, **named)

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        is_read_only = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if is_read_only and _is_ours(_getframe(1)):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(descriptor)

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        if _is_ours(_getframe(1)):
            _check_name(path)
        real_mkdir(path, *rest, **named)

    def checked(real: Callable[..., Any], *, moves: bool) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if _is_ours(_getframe(1)) and not named.get("dir_fd"):
                _refuse_held(path, *rest[:1] if moves else ())
                if moves:
                    _check_name(rest[0])
                if real is real_rename and os.path.lexists(rest[0]):
                    raise FileExistsError(
                        errno.EEXIST, "Cannot create a file when that file already exists", rest[0]
                    )
            return real(path, *rest, **named)

        return call

    for name in ("replace", "rename", "unlink", "remove", "rmdir"):
        patch.setattr(os, name, checked(getattr(os, name), moves=name in ("replace", "rename")))
    patch.setattr(os, "open", open_descriptor)
    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "mkdir", mkdir)
    patch.setattr(os, "O_BINARY", O_BINARY, raising=False)


def _play_processes(patch: pytest.MonkeyPatch, started: list[dict[str, Any]]) -> None:
    patch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", _NEW_PROCESS_GROUP, raising=False)
    patch.setattr(subprocess, "CREATE_NO_WINDOW", _NO_WINDOW, raising=False)
    real_start, real_kill = subprocess.Popen.__init__, os.kill

    def start(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        if _is_ours(_getframe(1)):
            started.append({"args": args, **named})
            named["start_new_session"] = bool(named.pop("creationflags", 0) & _NEW_PROCESS_GROUP)
        real_start(self, args, *rest, **named)

    def kill(pid: int, number: int) -> None:
        real_kill(pid, 9 if _is_ours(_getframe(1)) else number)

    patch.setattr(subprocess.Popen, "__init__", start)
    patch.setattr(os, "kill", kill)
    patch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    patch.setattr(signal, "CTRL_BREAK_EVENT", 1, raising=False)


if __name__ == "__main__":
    with on_windows():
        from lora_trainer.cli.main import main, run

        *first, last = map(json.loads, sys.argv[1:])
        assert all(run(line) == 0 for line in first)
        main(last)
