"""What a run says of itself, through the command line: slow steps with their cause, memory that grows, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_trainer.training import cores, loop
from tests.fakes.runs import Toy, problems, toy

STEPS = 40


@pytest.fixture
def place(tmp_path: Path) -> Toy:
    return toy(tmp_path).with_base()


def made_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps take 2 s each, 5 s from step 20 on; five stand for the fifteen that are usual.

    Other programs use nothing at the first look at the machine, and 1000 processors at others.
    """
    monkeypatch.setattr("lora_trainer.training.pace.BASELINE_STEPS", 5)
    seconds = iter([2.0] * 20 + [5.0] * STEPS)
    monkeypatch.setattr(loop._Reports, "lap_s", lambda self: next(seconds))

    def times() -> Iterator[cores.CpuTimes]:
        yield cores.CpuTimes(at_s=0.0, all_s=0.0, own_s=0.0)
        yield cores.CpuTimes(at_s=1.0, all_s=1.0, own_s=1.0)
        while True:
            yield cores.CpuTimes(at_s=2.0, all_s=2.0, own_s=2.0)
            yield cores.CpuTimes(at_s=3.0, all_s=1003.0, own_s=3.0)

    measured = times()
    monkeypatch.setattr("lora_trainer.training.pace._WATCHED_S", 0.0)
    monkeypatch.setattr("lora_trainer.training.pace.cpu_times", lambda numbers: next(measured))


def made_leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ten MiB a step be lost of sixteen; blocks of one step stand for those of twenty-five."""
    used = iter(range(10**9, 10**12, 10 * 2**20))

    real = loop.device_memory

    def measure(device: torch.device) -> dict[str, int]:
        return real(device) | {"host_own_bytes": next(used)}

    monkeypatch.setattr("lora_trainer.training.pace.BLOCK_STEPS", 1)
    monkeypatch.setattr(loop, "device_memory", measure)
    monkeypatch.setattr("lora_trainer.training.pace.free_ram_bytes", lambda: 16 * 2**20)


def test_slow_steps_and_growing_memory_are_explained_once(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_slow(monkeypatch)
    made_leaking(monkeypatch)
    pauses = {"train__validate_every_steps": 20, "output__save_every_steps": 15}
    assert place.train(steps=STEPS, **pauses) == 0
    slow, growing = (
        row
        for beginning in ("steps take", "host memory grows")
        for row in problems(place.run)
        if row["what"].startswith(beginning)
    )
    assert slow["what"].startswith("steps take 2.5 times as long as before, 5 s instead of 2")
    assert "other programs use" in slow["what"]
    assert growing["what"].startswith("host memory grows by 1000 MiB every 100 steps")
    assert "before the end" in growing["what"]
    assert slow["severity"] == growing["severity"] == "warning"
    assert "steps take 2.5 times" in capsys.readouterr().out
    assert "steps take 2.5 times" in (place.run / "report.html").read_text(encoding="utf-8")
