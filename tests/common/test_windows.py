"""Windows as far as this machine can play it: whole files, whole commands, and no name that exists on POSIX only.

Only calls from this project's own modules meet it (the frame of the caller decides): libraries have
their own code for Windows. `python -m tests.common.test_windows LINE...` runs command lines under it, each a JSON
list of words. What `on_windows` plays, with the source:

- `os.open` without `O_BINARY` is refused: it would translate "\n" to "\r\n" and end at Ctrl-Z (Microsoft, `_open`);
- a file that is open or mapped can be neither replaced, renamed nor removed, nor a folder around it
  (files are opened without FILE_SHARE_DELETE); `os.rename` onto an existing file fails (Python, `os.rename`);
- a folder cannot be opened, and `fsync` needs a file that may be written (FlushFileBuffers);
- names with <>:"|?*, those of devices, and those that end in a dot or space are refused or changed;
- `os.kill` ends a process at once whatever the signal (Python, `os.kill`); `start_new_session` does nothing,
  `creationflags` does.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sys import _getframe
from types import FrameType, ModuleType
from typing import Any

import psutil
import pytest
from lora_trainer.gui import command_lines, jobs
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common import files
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run import run_folder
from tests.fakes import runs
from tests.fakes.queues import until
from tests.fakes.runs import ROOT

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


# ---- whole trainings and files


@pytest.mark.timeout(600)
def test_a_training_resumes_with_the_same_numbers_as_elsewhere(tmp_path: Path) -> None:
    """With the defaults of a fresh install; what it leaves can be read there, and a pipe gets UTF-8."""
    here, there = (runs.toy(tmp_path / name).with_base() for name in ("here", "日本 – ✓"))
    assert here.train() == 0 and here.train("--resume", steps=9) == 0
    lines = (there.arguments(), there.arguments("--resume", steps=9))
    done = subprocess.run(
        [sys.executable, "-m", "tests.common.test_windows", *map(json.dumps, lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "日本 – ✓" in said, said[-4000:]
    assert runs.trajectory(there.run) == runs.trajectory(here.run)
    samples = runs.contents(here.run / "samples")
    assert samples and runs.contents(there.run / "samples") == samples
    entries = [runs.contents(one.cache, without={".memo"}).items() for one in (there, here)]
    assert entries[0] >= {pair for pair in entries[1] if pair[0].endswith(".safetensors")}
    for file in there.run.glob("*.jsonl"):
        assert b"\r" not in file.read_bytes()
    exported = str(there.run / "toy.safetensors")
    with on_windows():
        for words in (["inspect", exported], ["check", str(there.dataset)], ["doctor"]):
            assert runs.run_cli(words) == 0, words


# ---- processes, names, consoles


def test_what_is_started_outlives_its_console(tmp_path: Path) -> None:
    """A session means nothing to Windows: a Ctrl-C or closed window would take the training along."""
    work = Workplace(runs=tmp_path)
    with on_windows() as started:
        job = jobs.start(
            work, kind="try", argv=[sys.executable, "-c", "import time; time.sleep(60)"]
        )
        (runner,) = started
        until(lambda: (job.folder / jobs.RUNNER_FILE).exists())
        pid = files.read_json_object(job.folder / jobs.RUNNER_FILE)["pid"]
        until(lambda: bool(psutil.Process(pid).children()))
        jobs.stop(jobs.read(work, job.id))
        until(lambda: jobs.read(work, job.id).state != "running")
        assert jobs.read(work, job.id).exit_code is not None  # its runner lived on to write it down
    # A process group and a console of its own.
    assert "start_new_session" not in runner and runner["creationflags"] == 0x0800_0200


def test_ctrl_break_and_a_closing_window_stop_a_training() -> None:
    with on_windows(), taking_signals(StopFlag()):
        assert signal.getsignal(signal.SIGBREAK) != signal.SIG_DFL  # type: ignore[attr-defined]  # of Windows alone


def test_exit_codes_of_windows_say_how_a_training_ended() -> None:
    item = commands.Item(id="a", argv=(), folder="", label="", added_s=0.0, order=0)
    for code, state, said in (
        (0xC0000005, "failed", "crashed (Windows error 0xC0000005)"),
        (0xC000013A, "interrupted", "a closed window"),
        (15, "interrupted", "a user killed it"),
        (1, "failed", "and no message"),
    ):
        with on_windows():
            ended = worker._exited(item, code, last_words="")
        assert ended.state == state and said in ended.error


def test_a_file_that_is_open_is_replaced_when_it_is_closed_or_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virus scanner, an indexer, or the GUI reading status.json must not end a training."""
    file = tmp_path / "status.json"
    file.write_bytes(b"old")
    reader = file.open("rb")
    with on_windows():
        with monkeypatch.context() as patch, pytest.raises(MachineError, match="close the program"):
            patch.setattr(files, "_HELD_OPEN_S", 0.0)
            files.write_atomic(file, b"new")
        assert file.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr(time, "sleep", lambda _: reader.close())
        files.write_atomic(file, b"new")
    assert file.read_bytes() == b"new"


def test_a_name_that_windows_refuses_is_refused_before_anything_is_made() -> None:
    """On every system: the files of a run are copied to others. A run that has such a name is resumed."""
    for name in ("a:b", "Aux.v2", "toy.", "a?b"):
        with pytest.raises(RequestError, match="--name"):
            run_folder.checked_name(name)
        assert run_folder.checked_name(name, is_new=False) == name
        with on_windows(), pytest.raises(RequestError, match="--name"):
            run_folder.checked_name(name, is_new=False)
        with pytest.raises(RequestError, match="cannot be the name of a run"):
            command_lines.run_name(name)
        made = run_folder.name_of_folder(name)
        assert run_folder.checked_name(made) == made
    assert (
        run_folder.name_of_folder("a:b") == "a_b"
        and run_folder.name_of_folder("aux.v2") == "_aux.v2"
    )


# ---- what the code may not do


ALLOWED = {
    ("lora_trainer/common/files.py", "os.open"): "open_binary, which adds O_BINARY, and folders",
    ("lora_trainer/common/output.py", "os.open"): "the null device, of which nothing is read",
    ("lora_trainer/common/processes.py", "os.kill"): "behind sys.platform",
    ("lora_trainer/common/processes.py", "start_new_session"): "behind sys.platform",
    ("lora_trainer/checkpoint/states.py", "os.rename"): "tried again while it is open",
    (
        "lora_trainer/importing/command_lines.py",
        "posix",
    ): "an argument of shlex, which is the same everywhere",
    ("gui/datasets/journal.py", "os.sync"): "where it is there, else file by file",
    ("gui/server/access.py", "os.link"): "a rename where there are no links",
}
"""Places that may use them, with the reason."""


def test_no_code_relies_on_what_windows_lacks() -> None:
    """Nor writes text as anything but UTF-8 with "\\n": code pages cannot hold every caption."""
    modules = tomllib.loads(Path(__file__).with_name("lacking_on_windows.toml").read_text("utf-8"))
    everywhere = modules.pop("everywhere")
    lacking = {f"{module}.{name}" for module, names in modules.items() for name in names}
    used, wrong = set(), []
    roots = (ROOT / name for name in ("lora_trainer", "gui", "presets"))
    for path in (file for root in roots for file in root.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name):
                    names = [f"{module}.{name}"]
                case ast.ImportFrom(level=0, module=module):
                    names = [str(module), *(f"{module}.{alias.name}" for alias in node.names)]
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.keyword(arg=str(name)) | ast.Constant(value="start_new_session" as name):
                    names = [name]
                case ast.Call() if _text_mode_fault(node):
                    wrong.append(f"{file}:{node.lineno}")
            used |= {
                (file, name)
                for name in names
                if name in lacking or name.partition(".")[0] in everywhere
            }
    assert used == ALLOWED.keys(), "no longer used: take it out of ALLOWED"
    assert wrong == []


def _text_mode_fault(call: ast.Call) -> bool:
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr="open") if owner in OPEN_NO_FILE:
            return False
        case ast.Attribute(attr=name) | ast.Name(id=name):
            mode = next((word for word in words if isinstance(word, str)), "r")
            is_text = (name == "open" and "b" not in mode) or name == "write_text"
            needed = {"encoding"} if is_text or (name == "read_text" and not words) else set()
            if is_text and (name, mode) != ("open", "r"):
                needed.add("newline")
            return not needed <= {keyword.arg for keyword in call.keywords}
    return False


OPEN_NO_FILE = ("Image", "av", "os", "webbrowser", "tarfile", "archive", "content", "self")
"""Whose `open` is not that of files; `content` is of an archive."""


if __name__ == "__main__":
    with on_windows():
        from lora_trainer.cli.main import main, run

        *first, last = map(json.loads, sys.argv[1:])
        assert all(run(line) == 0 for line in first)
        main(last)
