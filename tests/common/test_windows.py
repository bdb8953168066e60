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
from lora_trainer.reporting.control import Control, StopFlag, taking_signals
from lora_trainer.run import run_folder
from tests.fakes import runs
from tests.fakes.runs import ROOT
from tests.fakes.windows import MISSING, MISSING_MODULES, on_windows

MODULES = [
    file for name in ("lora_trainer", "gui", "presets") for file in (ROOT / name).rglob("*.py")
]
ALL_BYTES = bytes(range(256)) * 64 + b"\r\n\n\r\x1a" * 8


def test_binary_files_hold_the_bytes_that_were_written(tmp_path: Path) -> None:
    """Without O_BINARY the C runtime makes 16,456 bytes longer, and reading ends at Ctrl-Z."""
    with on_windows():
        files.write_atomic(tmp_path / "a.bin", ALL_BYTES)
    assert (tmp_path / "a.bin").read_bytes() == ALL_BYTES


def on_windows_command(*lines: list[str], code: int = 0, **environment: str) -> str:
    """Run command lines in a process that plays Windows; return its error output."""
    program = [sys.executable, "-W", "error::EncodingWarning", "-m", "tests.fakes.windows"]
    done = subprocess.run(
        [*program, *map(json.dumps, lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


@pytest.mark.timeout(600)
def test_a_training_resumes_with_the_same_numbers_as_elsewhere(tmp_path: Path) -> None:
    """With the defaults of a fresh install; what it leaves can be read there."""
    here, there = (runs.toy(tmp_path / name).with_base() for name in ("here", "there"))
    assert here.train() == 0 and here.train("--resume", steps=9) == 0
    on_windows_command(there.arguments(), there.arguments("--resume", steps=9))
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
        children = psutil.Process(_runner(job)).children
        until(lambda: bool(children()))
        jobs.stop(jobs.read(work, job.id))
        until(lambda: jobs.read(work, job.id).state != "running")
        assert jobs.read(work, job.id).exit_code is not None  # its runner lived on to write it down
    assert "start_new_session" not in runner
    assert (
        runner["creationflags"] == 0x200 | 0x0800_0000
    )  # a process group and a console of its own


def test_a_training_is_stopped_by_files_where_there_are_no_signals(tmp_path: Path) -> None:
    """What the buttons Stop and Force stop do; Ctrl-Break and a closing window stop it as SIGTERM does."""
    control = Control(tmp_path)
    with on_windows():
        stop = StopFlag(control=control)
        assert stop() is None
        control.request("stop")
        assert stop() == signal.SIGTERM and control.pending() == set()
        control.request("stop_now")
        with pytest.raises(KeyboardInterrupt):
            stop()
        assert control.pending() == set()
        with taking_signals(StopFlag()):
            assert signal.getsignal(signal.SIGBREAK) != signal.SIG_DFL  # type: ignore[attr-defined]


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_s, "it did not come to it"
        os.sched_yield()


def _runner(job: jobs.Job) -> int:
    return int(files.read_json_object(job.folder / jobs.RUNNER_FILE)["pid"])


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        (0xC0000005, "failed", "crashed (Windows error 0xC0000005)"),
        (0xC000013A, "interrupted", "a closed window"),
        (15, "interrupted", "a user killed it"),
        (1, "failed", "and no message"),
    ],
)
def test_exit_codes_of_windows_say_how_a_training_ended(code: int, state: str, said: str) -> None:
    item = commands.Item(id="a", argv=(), folder="", label="", added_s=0.0, order=0)
    with on_windows():
        ended = worker._exited(item, code, last_words="")
    assert ended.state == state and said in ended.error


def test_a_file_that_is_open_for_a_moment_is_replaced_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virus scanner, an indexer, or the GUI reading status.json must not end a training."""
    file = tmp_path / "status.json"
    file.write_bytes(b"old")
    reader = file.open("rb")
    monkeypatch.setattr(time, "sleep", lambda _: reader.close())
    with on_windows():
        files.write_atomic(file, b"new")
    assert file.read_bytes() == b"new"


def test_a_file_that_stays_open_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HELD_OPEN_S", 0.0)
    file = tmp_path / "lora.safetensors"
    file.write_bytes(b"old")
    with file.open("rb"), on_windows(), pytest.raises(MachineError, match="close the program"):
        files.write_atomic(file, b"new")
    assert file.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["a:b", "Aux.v2", "toy."])
def test_a_name_that_windows_refuses_is_refused_before_anything_is_made(name: str) -> None:
    assert run_folder.checked_name(name) == name
    with on_windows(), pytest.raises(RequestError, match="--name"):
        run_folder.checked_name(name)


def test_a_pipe_with_another_encoding_gets_utf_8(tmp_path: Path) -> None:
    """Else logs hold cp1252 and the words of a child can not be decoded."""
    folder = tmp_path / "日本 – ✓"
    folder.mkdir()
    error = on_windows_command(["check", str(folder)], code=3, PYTHONIOENCODING="cp1252")
    assert "日本 – ✓" in error


# ---- what the code may not do


ALLOWED = {
    ("lora_trainer/common/files.py", "os.open"): "open_binary, which adds O_BINARY, and folders",
    ("lora_trainer/common/processes.py", "os.kill"): "behind sys.platform",
    ("lora_trainer/common/processes.py", "start_new_session"): "behind sys.platform",
    ("lora_trainer/checkpoint/states.py", "os.rename"): "tried again while it is open",
    ("gui/journal.py", "os.sync"): "where it is there, else file by file",
    ("gui/access.py", "os.link"): "a rename where there are no links",
}
"""Places that may use names that Windows lacks, with the reason."""
_BEHAVES_OTHERWISE = {"os.open", "os.kill", "os.rename", "os.link"}
_BEHAVES_OTHERWISE |= {"start_new_session", "preexec_fn", "close_fds", "pass_fds"}


def test_no_code_relies_on_what_windows_lacks() -> None:
    """Nor writes text as anything but UTF-8 with "\\n": code pages cannot hold every caption."""
    used, wrong = set(), []
    for path in MODULES:
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used |= {(file, name) for name in _names_of(node)}
            if isinstance(node, ast.Call) and _text_mode_fault(node):
                wrong.append(f"{file}:{node.lineno}")
    missing = {
        (file, name)
        for file, name in used
        if name in _BEHAVES_OTHERWISE
        or name.partition(".")[2] in MISSING.get(name.partition(".")[0], ())
        or name.partition(".")[0] in MISSING_MODULES
    }
    assert missing == ALLOWED.keys(), "no longer used: take it out of ALLOWED"
    assert wrong == []


def _names_of(node: ast.AST) -> list[str]:
    """Return the `module.name`, imports or text that a node holds."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    return [node.value] if getattr(node, "value", None) == "start_new_session" else []


def _text_mode_fault(call: ast.Call) -> bool:
    named = {keyword.arg for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    if name == "read_text":
        return "encoding" not in named and not words
    if name == "write_text":
        return not {"encoding", "newline"} <= named
    if name == "open" and not (isinstance(call.func, ast.Attribute) and _opens_no_file(call.func)):
        mode = next((word for word in words if isinstance(word, str)), "r")
        needed = {"encoding"} if mode == "r" else {"encoding", "newline"}
        return "b" not in mode and not needed <= named
    return False


def _opens_no_file(function: ast.Attribute) -> bool:
    """`content` is of an archive."""
    others = {"Image", "os", "webbrowser", "tarfile", "archive", "content", "self"}
    return isinstance(function.value, ast.Name) and function.value.id in others
