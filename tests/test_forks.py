"""Tests run in forks as they do in one process: each once, and one that ends its process takes no other with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = """
import os, signal, subprocess, sys, threading, warnings
from pathlib import Path
import pytest
NAME = Path(__file__).stem
def told(what):
    with Path(__file__).with_suffix(".told").open("a") as file:
        print(os.getpid(), os.environ["HOME"], what, file=file)
def test_first(tmp_path):
    assert not list(tmp_path.iterdir())
    (tmp_path / NAME).touch()
    warnings.warn("is told")
    told("first")
def test_ends_its_process():
    print("said by", NAME)
    if NAME == "test_a":
        waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        with Path(__file__).with_name("alive").open("wb") as alive:
            subprocess.Popen(waits, stdout=alive, start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)
    assert NAME != "test_b"
@pytest.mark.timeout(1 if NAME == "test_c" else 0)
def test_waits():
    threading.Event().wait(None if NAME == "test_c" else 0)
def test_last():
    told("last")
"""


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    words = [
        "-m",
        "pytest",
        "-p",
        "tests.forks",
        "--forks",
        "2",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-q",
    ]
    return subprocess.run(
        [sys.executable, *words, *options, str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_test_runs_once_and_one_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(MODULE, encoding="utf-8")
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    done = run(tmp_path)
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""  # once the program that test_a left running has ended
    os.close(alive)
    lines = done.stdout.splitlines()
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "its process ended with -9 (negative: a signal)" in lines
    assert sorted(line.split()[1] for line in lines if line.startswith("FAILED")) == [
        "test_a.py::test_ends_its_process",
        "test_b.py::test_ends_its_process",
        "test_c.py::test_waits",
    ]
    assert "Failed: Timeout" in done.stdout
    assert lines.count("said by test_b") == lines.count("said by test_c") == 1
    assert done.stdout.count("UserWarning: is told") == 3
    assert "3 failed, 9 passed" in lines[-1]
    places = {}
    for name in "abc":
        told = (tmp_path / f"test_{name}.told").read_text(encoding="utf-8").split("\n")[:-1]
        assert [line.split()[-1] for line in told] == ["first", "last"]
        places[name] = [tuple(line.split()[:2]) for line in told]
    assert places["a"][0] != places["a"][1]  # another fork went on
    assert places["b"][0] == places["b"][1] and places["c"][0] == places["c"][1]
    of_processes = {home for pairs in places.values() for _, home in pairs}
    assert len(of_processes) == len({pid for pairs in places.values() for pid, _ in pairs})
    stopped = run(tmp_path, "-x", "--deselect=test_a.py")
    assert stopped.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    for number in (1, 2):  # homes that cannot be made: the processes end before their first test
        shutil.rmtree(tmp_path / f"fork-{number}")
        (tmp_path / f"fork-{number}").write_text("", encoding="utf-8")
    lost = run(tmp_path, "--deselect=test_a.py")
    assert lost.returncode == pytest.ExitCode.TESTS_FAILED, lost.stdout
    assert "a test process ended with 1 where it ran no test" in lost.stdout
