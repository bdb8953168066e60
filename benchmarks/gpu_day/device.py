"""Where and how large the cases of a slice are measured, and how long a piece of work takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_trainer.hardware.device_calls import synchronize

ROUNDS = {"cuda": 20, "cpu": 3}


@dataclass(frozen=True, kw_only=True)
class Here:
    """The device, whether sizes are tiny, and a folder whose files later cases find."""

    device: torch.device
    tiny: bool
    folder: Path


def median_s(work: Callable[[], Any], *, device: torch.device) -> float:
    """Return the seconds of a piece of work, the median of many that follow each other on the device."""
    for _ in range(2):
        work()
    rounds = ROUNDS[device.type]
    if device.type != "cuda":
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    synchronize(device)
    for mark in marks[:-1]:
        mark.record()
        work()
    marks[-1].record()
    synchronize(device)
    pairs = zip(marks, marks[1:], strict=False)
    return statistics.median(float(first.elapsed_time(second)) for first, second in pairs) / 1000
