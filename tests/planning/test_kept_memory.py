"""Memory that a process keeps for its next picture: plans count it as free, and whoever needs it ends the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lora_trainer.common.files import json_bytes, user_cache_folder
from lora_trainer.hardware import kept_memory
from lora_trainer.hardware.kept_memory import (
    KEPT_MEMORY_FILE,
    keep,
    keeper,
    make_room,
    take_back,
    take_back_gpu,
    taken_by,
)
from lora_trainer.hardware.machine import GIB, detect
from tests.fakes.nvml import FakeCard, FakeNvml


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for ever, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()  # it has its memory now
        yield started
        started.kill()


def told(**fields: object) -> None:
    """Write what a process says of itself."""
    file = user_cache_folder() / KEPT_MEMORY_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(json_bytes(fields))


def test_memory_that_is_kept_counts_as_free_on_its_gpu_and_in_the_machine(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    cards = (FakeCard(free_bytes=4 * GIB), FakeCard(free_bytes=4 * GIB, uuid="GPU-bbbb"))
    started_s = psutil.Process(process.pid).create_time()
    before = detect(nvml=FakeNvml(cards=cards), environment={})
    assert "pictures" not in before.reasons["ram_free_bytes"]
    told(pid=process.pid, started_s=started_s, gpu_uuid="GPU-bbbb", gpu_bytes=6 * GIB)
    found = keeper()
    assert found is not None and found.ram_bytes > 0
    beside = detect(nvml=FakeNvml(cards=cards), environment={})
    assert [gpu.free_bytes for gpu in beside.gpus] == [4 * GIB, 10 * GIB]
    assert "that pictures keep" in beside.reasons["ram_free_bytes"]
    # More than a GPU has is a mistake of whoever wrote it.
    told(pid=process.pid, started_s=started_s, gpu_uuid="GPU-bbbb", gpu_bytes=99 * GIB)
    assert detect(nvml=FakeNvml(cards=cards), environment={}).gpus[1].free_bytes == 12 * GIB


@pytest.mark.parametrize("kept_on", ["", "GPU-bbbb"])
def test_a_training_that_fits_beside_it_lets_the_process_be_but_not_on_a_gpu(
    process: subprocess.Popen[bytes], kept_on: str
) -> None:
    take_back_gpu()  # nobody keeps anything
    make_room(needed_bytes=GIB, free_bytes=0)
    started_s = psutil.Process(process.pid).create_time()
    told(pid=process.pid, started_s=started_s, gpu_uuid=kept_on, gpu_bytes=1)
    take_back_gpu()
    assert (process.poll() is None) == (not kept_on)
    if kept_on:
        return
    kept = keeper()
    assert kept is not None
    # It counts as free in what a plan may use.
    make_room(needed_bytes=3 * GIB, free_bytes=4 * GIB + kept.ram_bytes)
    assert process.poll() is None
    make_room(needed_bytes=3 * GIB, free_bytes=3 * GIB)
    assert process.poll() is not None


def test_the_process_is_ended_before_its_memory_is_needed_and_no_other_that_has_its_number(
    process: subprocess.Popen[bytes],
) -> None:
    take_back()  # nobody keeps anything
    started_s = psutil.Process(process.pid).create_time()
    for fields in ({"pid": process.pid, "started_s": started_s - 60}, {"pid": "x"}, {}):
        told(**fields)
        assert keeper() is None
        take_back()
    assert process.poll() is None
    told(pid=process.pid, started_s=started_s)
    take_back()
    assert keeper() is None
    assert process.poll() is not None
    keep(gpu_uuid="", gpu_bytes=0)
    assert keeper() is None, "a process does not end itself"
    take_back()


def test_who_is_ended_for_its_memory_learns_by_whom_and_nobody_else_does(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = psutil.Process(process.pid).create_time()
    told(pid=process.pid, started_s=started_s)
    take_back()
    own = psutil.Process().pid
    assert taken_by() is None, "of another process"
    monkeypatch.setattr(kept_memory.os, "getpid", lambda: process.pid)
    found = taken_by()
    assert found is not None and found.pid == own


def test_who_gives_its_memory_back_for_nobody_is_told_nothing(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(pid=process.pid, started_s=psutil.Process(process.pid).create_time())
    take_back(is_told=False)
    assert process.poll() is not None
    monkeypatch.setattr(kept_memory.os, "getpid", lambda: process.pid)
    assert taken_by() is None
