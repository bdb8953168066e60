"""Windows as far as this machine can play it: its C runtime, files, names, processes and encodings.

Only calls from this project's own modules meet it (the frame of the caller decides): libraries have
their own code for Windows. `on_windows()` is a context manager, and `python -m tests.fakes.windows
LINE...` runs command lines under it, each a JSON list of words. What it plays, with the source:

- `os.open` without `O_BINARY` translates "\n" to "\r\n" and ends at Ctrl-Z (Microsoft, `_open`, `_write`);
  text files opened without `newline` and `encoding` get "\r\n" and cp1252 (Python, `open`);
- a file that is open or mapped can be neither replaced, renamed nor removed, nor a folder around it
  (files are opened without FILE_SHARE_DELETE); `os.rename` onto an existing file fails (Python, `os.rename`);
- a folder cannot be opened, and `fsync` needs a file that may be written (FlushFileBuffers);
- names with <>:"|?*, those of devices, and those that end in a dot or space are refused or changed;
- `os.kill` ends a process at once whatever the signal (Python, `os.kill`); `start_new_session` does nothing,
  `creationflags` does; the names in `MISSING` are absent.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
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

OURS = ("lora_trainer", "gui", "presets")
O_BINARY = 0x8000
_LACKING = {
    "os": """chown chroot fork forkpty fchmod fchown getegid geteuid getgid getgroups getpgid getpgrp
        getpriority getsid getuid killpg lchown major minor mkfifo mknod nice openpty posix_fadvise
        posix_fallocate posix_spawn pread pwrite readv writev sched_getaffinity sched_setaffinity
        sched_yield sendfile setegid seteuid setgid setpgid setpriority setsid setuid statvfs fstatvfs
        sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid O_CLOEXEC O_DIRECT O_DIRECTORY
        O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC O_TMPFILE""",
    "signal": """SIGKILL SIGHUP SIGALRM SIGCHLD SIGCONT SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
        SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
    "time": "clock_gettime clock_settime tzset",
    "socket": "AF_UNIX SO_REUSEPORT",
}
_LACKING_MODULES = "fcntl grp posix pty pwd readline resource syslog termios tty crypt spwd"
MISSING = {module: frozenset(names.split()) for module, names in _LACKING.items()}
"""The names that these modules lack on Windows (Python's documentation, "Availability: Unix")."""
MISSING_MODULES = frozenset(_LACKING_MODULES.split())
_NEW_PROCESS_GROUP, _NO_WINDOW = 0x200, 0x08000000


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the code that asked is this project's; what only passes a call on is looked past."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in {"pathlib", "shutil", "os", "contextlib", "tests"}:
            return name.partition(".")[0] in OURS
        frame = frame.f_back
    return False


def _check_name(path: Any) -> None:
    """Raise OSError for a name that Windows refuses, or would silently change."""
    parts = () if isinstance(path, int) else Path(os.fsdecode(path)).parts
    for part in parts:
        if part not in (os.sep, ".", "..") and (why := files.windows_name_problem(part)):
            raise OSError(errno.EINVAL, why, part)


def _held(path: Any) -> bool:
    """Whether this process has the file open or mapped, or one inside the folder."""
    real = os.path.realpath(os.fsdecode(path))
    held = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            held.add(str(descriptor.readlink()))
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        held.add(line[73:])
    return real in held or any(name.startswith(f"{real}{os.sep}") for name in held)


def _refuse_held(*paths: Any) -> None:
    for path in paths:
        if os.path.lexists(path) and _held(path):
            raise PermissionError(
                errno.EACCES,
                "The process cannot access the file because it is being used by another process",
                os.fsdecode(path),
            )


class _Lacking(ModuleType):
    """A module that hides from our code what Windows lacks."""

    def __getattribute__(self, name: str) -> Any:
        own = ModuleType.__getattribute__(self, "__dict__")
        caller = str(_getframe(1).f_globals.get("__name__", ""))
        if name in own.get("_windows_lacks", ()) and caller.partition(".")[0] in OURS:
            raise AttributeError(f"module {own['__name__']!r} has no attribute {name!r} on Windows")
        if name in own.get("_windows_has", ()) and caller.partition(".")[0] in OURS:
            return own["_windows_has"][name]
        return ModuleType.__getattribute__(self, name)


def _hide(
    patch: pytest.MonkeyPatch, module: ModuleType, *, hidden: frozenset[str], **told: Any
) -> None:
    patch.setattr(module, "_windows_lacks", hidden, raising=False)
    patch.setattr(module, "_windows_has", told, raising=False)
    patch.setattr(module, "__class__", _Lacking)


@contextmanager
def on_windows() -> Iterator[list[dict[str, Any]]]:
    """Play Windows while the block runs; give the arguments of every process our code starts."""
    started: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        _play_files(patch)
        _play_processes(patch, started)
        for name, hidden in MISSING.items():
            told: dict[str, Any] = {"name": "nt"} if name == "os" else {}
            _hide(patch, sys.modules.get(name) or __import__(name), hidden=hidden, **told)
        _hide(patch, sys, hidden=frozenset(), platform="win32")
        yield started


def _play_files(patch: pytest.MonkeyPatch) -> None:
    text: set[int] = set()
    real_open, real_write, real_read, real_close = os.open, os.write, os.read, os.close
    real_fsync, real_io_open = os.fsync, io.open

    def open_descriptor(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if not _is_ours(_getframe(1)):
            return real_open(path, flags, *rest, **named)
        _check_name(path)
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", os.fsdecode(path))
        descriptor = real_open(path, flags & ~O_BINARY, *rest, **named)
        if not flags & O_BINARY:
            text.add(descriptor)
        return descriptor

    def write(descriptor: int, data: Any) -> int:
        if descriptor not in text:
            return real_write(descriptor, data)
        translated = memoryview(bytes(data).replace(b"\n", b"\r\n"))
        while translated:
            translated = translated[real_write(descriptor, translated) :]
        return len(data)

    def read(descriptor: int, size: int) -> bytes:
        data = real_read(descriptor, size)
        return data.replace(b"\r\n", b"\n").partition(b"\x1a")[0] if descriptor in text else data

    def close(descriptor: int) -> None:
        text.discard(descriptor)
        real_close(descriptor)

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY and _is_ours(
            _getframe(1)
        ):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(descriptor)

    def open_file(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None,
                  errors: Any = None, newline: Any = None, *rest: Any, **named: Any) -> Any:  # fmt: skip
        if _is_ours(_getframe(1)):
            _check_name(file)
            text.discard(file)  # CPython sets a descriptor that it wraps to binary
            if "b" not in mode:
                encoding = "cp1252" if encoding in (None, "locale") else encoding
                newline = "\r\n" if newline is None and set(mode) & set("wax+") else newline
        return real_io_open(file, mode, buffering, encoding, errors, newline, *rest, **named)

    for name, fake in {
        "open": open_descriptor,
        "write": write,
        "read": read,
        "close": close,
        "fsync": fsync,
    }.items():
        patch.setattr(os, name, fake)
    patch.setattr(os, "O_BINARY", O_BINARY, raising=False)
    patch.setattr(io, "open", open_file)
    patch.setattr(builtins, "open", open_file)
    _play_names(patch)


def _play_names(patch: pytest.MonkeyPatch) -> None:
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

    real_rename, real_mkdir = os.rename, os.mkdir
    for name, moves in {
        "replace": True,
        "rename": True,
        "unlink": False,
        "remove": False,
        "rmdir": False,
    }.items():
        patch.setattr(os, name, checked(getattr(os, name), moves=moves))

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        if _is_ours(_getframe(1)):
            _check_name(path)
        real_mkdir(path, *rest, **named)

    patch.setattr(os, "mkdir", mkdir)


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
