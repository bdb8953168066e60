"""How fast this machine has trained so far, and how busy it is: both correct the predicted time of a run. No torch.

A prediction from arithmetic knows neither a machine's cooling nor its slow memory, and other programs take their
share of a processor. So each finished run of enough steps leaves how much longer its steps took than predicted, in
a table of the memo in the cache folder: an entry for each device, family and version of torch. Outputs: a `Pace`
that corrects ranges of seconds, and says so. What is decided by time, such as which load is fastest, is not corrected:
the same request gives the same settings on a busy machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lora_trainer.common.memo import MemoTable
from lora_trainer.hardware.machine import Hardware
from lora_trainer.hardware.nvml import Gpu

_TABLE = "pace"
_KEPT = 5
# Fewer steps than this tell nothing: the first ones compile, allocate and read.
LEAST_STEPS = 20
# From one run to the next of the same kind a machine differs by about this factor.
_SPREAD = 1.25
# Other programs that use less than this share of a processor do not count.
_LEAST_BUSY = 0.5


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A finished run: its steps took `slower` times as long as predicted for an idle machine of this kind.

    `load` is the factor of `load_factor` at its start.
    """

    slower: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Factors on the shortest and the longest time to expect, or on their middle where runs are known."""

    past: tuple[PastRun, ...] = ()
    load: float = 1.0
    busy: float = 0.0

    def of(self, seconds: tuple[float, float]) -> tuple[float, float]:
        """Return a range of seconds as this machine takes them."""
        low_s, high_s = seconds
        if self.past:
            # A run that was slow beside other programs says how fast it would have been alone.
            alone = [run.slower / run.load for run in self.past]
            middle_s = math.sqrt(low_s * high_s)
            low_s, high_s = middle_s * min(alone) / _SPREAD, middle_s * max(alone) * _SPREAD
        return low_s, high_s * self.load

    def of_parts(self, parts: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return a run's parts as this machine takes them; reading from the disk does not follow its steps."""
        return {name: s if name == "start" else self.of(s) for name, s in parts.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What corrects the estimate, each in a few words; none where nothing does."""
        parts = []
        if self.past:
            factor = f"{median(run.slower for run in self.past):.2g}"
            parts.append(f"finished runs on this machine took {factor} times the estimate")
        if self.load > 1:
            parts.append(f"other programs use {self.busy:.1f} processors now")
        return tuple(parts)


def load_factor(hardware: Hardware) -> float:
    """Return how much longer a training on the processor takes beside what runs now.

    The system gives each running thread the same share: with `busy` others, `threads` of ours get their part.
    """
    processors, threads = hardware.processors or hardware.cpu_threads, hardware.cpu_threads
    if hardware.busy_processors < _LEAST_BUSY:
        return 1.0
    share = processors * threads / (threads + hardware.busy_processors)
    return max(1.0, threads / share)


def pace_here(hardware: Hardware, *, gpu: Gpu | None, past: Sequence[PastRun]) -> Pace:
    """Return what corrects a prediction for this machine."""
    load = load_factor(hardware) if gpu is None else 1.0
    return Pace(past=tuple(past), load=load, busy=hardware.busy_processors)


def known_runs(
    cache_root: Path, hardware: Hardware, *, gpu: Gpu | None, family: str
) -> tuple[PastRun, ...]:
    """Return the last finished runs of a family on this device. Never raises."""
    table = MemoTable.load(cache_root, _TABLE)
    entry = table.get(_key(hardware, gpu, family))
    with suppress(ValueError, TypeError):
        pairs = [(float(slower), float(load)) for slower, load in json.loads(entry or "[]")]
        return tuple(
            PastRun(slower=slower, load=load)
            for slower, load in pairs
            if 0 < slower < math.inf and 1 <= load < math.inf
        )
    return ()


def remember_run(
    cache_root: Path, hardware: Hardware, run: PastRun, *, gpu: Gpu | None, family: str
) -> None:
    """Note how a finished run went; raises MachineError for a disk that refuses."""
    runs = (*known_runs(cache_root, hardware, gpu=gpu, family=family), run)[-_KEPT:]
    table = MemoTable.load(cache_root, _TABLE)
    pairs = [[round(past.slower, 4), round(past.load, 3)] for past in runs]
    table.put(_key(hardware, gpu, family), json.dumps(pairs))
    table.save()


def _key(hardware: Hardware, gpu: Gpu | None, family: str) -> str:
    device = (
        f"{gpu.name}, {gpu.total_bytes}" if gpu else f"{hardware.cpu_name}, {hardware.cpu_threads}"
    )
    return f"{device}, {family}, torch {hardware.packages.get('torch')}"
