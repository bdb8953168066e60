"""Windows, played on this machine: whole files, whole commands, and no name that exists on POSIX only."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from lora_trainer.gui import jobs
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common import files
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run import run_folder
from tests.fakes import runs
from tests.fakes.runs import ROOT
from tests.fakes.windows import on_windows

MODULES = [
    file for name in ("lora_trainer", "gui", "presets") for file in (ROOT / name).rglob("*.py")
]


@pytest.mark.timeout(600)
def test_a_training_resumes_with_the_same_numbers_as_elsewhere(tmp_path: Path) -> None:
    """With the defaults of a fresh install; what it leaves can be read there, and a pipe gets UTF-8."""
    here, there = (runs.toy(tmp_path / name).with_base() for name in ("here", "日本 – ✓"))
    assert here.train() == 0 and here.train("--resume", steps=9) == 0
    lines = (there.arguments(), there.arguments("--resume", steps=9))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.windows", *map(json.dumps, lines)],
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

    def until(condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < ends_s, "it did not come to it"
            os.sched_yield()

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
    for name in ("a:b", "Aux.v2", "toy."):
        assert run_folder.checked_name(name) == name
        with on_windows(), pytest.raises(RequestError, match="--name"):
            run_folder.checked_name(name)


# ---- what the code may not do


LACKING = {
    "os": """chown chroot fork forkpty fchmod fchown getegid geteuid getgid getgroups getpgid getpgrp
        getpriority getsid getuid killpg lchown major minor mkfifo mknod nice openpty posix_fadvise
        posix_fallocate posix_spawn pread pwrite readv writev sched_getaffinity sched_setaffinity
        sched_yield sendfile setegid seteuid setgid setpgid setpriority setsid setuid statvfs fstatvfs
        sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid O_CLOEXEC O_DIRECT O_DIRECTORY
        O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC O_TMPFILE open kill rename link""",
    "signal": """SIGKILL SIGHUP SIGALRM SIGCHLD SIGCONT SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
        SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
    "time": "clock_gettime clock_settime tzset",
    "socket": "AF_UNIX SO_REUSEPORT",
    "": """fcntl grp posix pty pwd readline resource syslog termios tty crypt spwd start_new_session preexec_fn
        close_fds pass_fds""",
}
"""What Windows lacks (Python's documentation, "Availability: Unix") or does otherwise: names of modules, and
modules and arguments."""
ALLOWED = {
    ("lora_trainer/common/files.py", "os.open"): "open_binary, which adds O_BINARY, and folders",
    ("lora_trainer/common/processes.py", "os.kill"): "behind sys.platform",
    ("lora_trainer/common/processes.py", "start_new_session"): "behind sys.platform",
    ("lora_trainer/checkpoint/states.py", "os.rename"): "tried again while it is open",
    ("gui/journal.py", "os.sync"): "where it is there, else file by file",
    ("gui/access.py", "os.link"): "a rename where there are no links",
}
"""Places that may use them, with the reason."""


def test_no_code_relies_on_what_windows_lacks() -> None:
    """Nor writes text as anything but UTF-8 with "\\n": code pages cannot hold every caption."""
    lacking = {
        f"{module}.{name}".lstrip(".") for module in LACKING for name in LACKING[module].split()
    }
    used, wrong = set(), []
    for path in MODULES:
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
            used |= {(file, name) for name in names if name in lacking}
            used |= {
                (file, name) for name in names if name.partition(".")[0] in LACKING[""].split()
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


OPEN_NO_FILE = ("Image", "os", "webbrowser", "tarfile", "archive", "content", "self")
"""Whose `open` is not that of files; `content` is of an archive."""
