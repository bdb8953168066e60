"""How fast this machine has trained so far, which corrects the predicted time of a run; and how busy it is. No torch.

A prediction from arithmetic knows neither a machine's cooling nor its slow memory. So each finished run of enough steps
leaves, for each part of its time, how much longer that part took than predicted, in a table of the memo in the cache
folder: an entry for each device, family and version of torch. The runs that are most like the planned one count.
Outputs: a `Pace` that corrects ranges of seconds, and says where the figures come from. What is decided by time, such
as which load is fastest, is not corrected.

Other programs take their share of the device, but for as long as they run, which nobody knows: so they are said beside
the time and not counted in it. The same training has the same time in two places and in two minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lora_trainer.common.memo import MemoTable
from lora_trainer.hardware.machine import Hardware
from lora_trainer.hardware.nvml import Gpu

# Version 1 knew only the steps of a run, and not which kind of run it was; version 2 not how large its base was.
_TABLE, _VERSION = "pace", "3"
# Of each kind the last few runs are kept: a driver, a cooler or a library may have changed since.
_KEPT = 5
# Fewer steps than this tell nothing: the first ones compile, allocate and read.
LEAST_STEPS = 20
# From one run to the next of the same kind a machine differs by about this factor.
_SPREAD = 1.25
# Other programs that use less than this of a processor, or of a GPU's time, do not count: every desktop has some.
_LEAST_BUSY, _LEAST_GPU_BUSY = 0.5, 0.1
_LEAST_LOAD = 1.05
"""Other programs that make less of a difference are not spoken of: it would be rounded to 1.0."""
_LEFT_OVER = 0.25
"""With so many processors idle on average, a training waited for none of them."""
STEPS = "steps"


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """What makes runs of one family on one device alike; `parameters` are those of the denoiser."""

    priority: str
    resolution_px: int
    parameters: int

    def tells_of(self, other: RunKind) -> bool:
        """Whether its time says anything of the other's: a small network waits for what a large one does not notice."""
        return self.parameters == other.parameters

    def distance(self, other: RunKind) -> int:
        """Return 0 for the same kind, more for less alike; the size of the images weighs most."""
        return 2 * (self.resolution_px != other.resolution_px) + (self.priority != other.priority)


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A finished run: each part took `slower` times as long as predicted for an idle machine of this kind.

    The parts are those of planning/run_time.py; `steps` is always there. `load` is how much longer other programs
    made it. `cores` is how many processors it would have kept busy without them: a small network leaves some of its
    threads waiting. None on a GPU, and in what earlier versions wrote.
    """

    kind: RunKind
    slower: Mapping[str, float]
    load: float
    cores: float | None = None

    def alone(self, part: str) -> float:
        """Return how much longer than predicted a part would have taken without other programs."""
        return self.slower.get(part, self.slower[STEPS]) / self.load


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Corrects ranges of seconds by the finished runs that are most like the planned one.

    `load` is how much longer a training takes beside the programs that run now; it corrects nothing.
    """

    past: tuple[PastRun, ...] = ()
    is_same_kind: bool = True
    load: float = 1.0
    busy: str = ""
    """What other programs use now and what that makes of the time, in words; to be said where `load` counts."""

    def of(self, part: str, seconds: tuple[float, float]) -> tuple[float, float]:
        """Return the range of seconds of a part as this machine takes them without other programs.

        With finished runs its middle is the median of what they took, and it spans all of them.
        """
        low_s, high_s = seconds
        if self.past:
            factors = [run.alone(part) for run in self.past]
            usual = median(factors)
            spread = max(_SPREAD, max(factors) / usual, usual / min(factors))
            middle_s = usual * math.sqrt(low_s * high_s)
            low_s, high_s = middle_s / spread, middle_s * spread
        return low_s, high_s

    def of_parts(self, parts: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return the ranges of all parts of a run as this machine takes them."""
        return {name: self.of(name, seconds) for name, seconds in parts.items()}

    @property
    def source(self) -> str:
        """Where the predicted time comes from, in a few words."""
        count = len(self.past)
        if not count:
            return "an estimate: no such training has finished on this machine yet"
        if self.is_same_kind:
            one = "from 1 finished run on this machine"
            return one if count == 1 else f"from {count} finished runs on this machine"
        one = "from 1 finished run on this machine, of another size or priority"
        several = f"from {count} finished runs on this machine, of another size or priority"
        return one if count == 1 else several

    @property
    def beside_others(self) -> float:
        """How many times as long a training takes beside what runs now, 1 where that is not worth a word."""
        return self.load if self.load >= _LEAST_LOAD else 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the predicted time comes from, and what it does not count, each in a few words."""
        return (self.source, self.busy) if self.beside_others > 1 else (self.source,)


def load_factor(hardware: Hardware, gpu: Gpu | None, *, cores: float | None = None) -> float:
    """Return how much longer a training takes beside what runs now on its device.

    `cores` is how many processors it keeps busy when it is alone; without it one that all its threads keep busy.
    """
    if gpu is not None:
        # Programs take turns on a GPU: one that always computes gets a half, one that wants less gets what it wants.
        busy = gpu.busy_fraction
        return 1 / (1 - min(busy, 0.5)) if busy >= _LEAST_GPU_BUSY else 1.0
    if hardware.busy_processors < _LEAST_BUSY:
        return 1.0
    # The system gives each running thread the same share of the processors, once they want more than there are.
    # Threads that read images come and go beside those that compute, and do not hold these up.
    threads = hardware.cpu_threads
    processors, wanted = hardware.processors or threads, min(cores or threads, threads)
    return max(1.0, (wanted + hardware.busy_processors) / processors)


def others_text(hardware: Hardware, gpu: Gpu | None) -> str:
    """Return what other programs use of the device that trains, in words."""
    if load_factor(hardware, gpu) == 1:
        return "other programs do not slow it now"
    if gpu is None:
        processors = hardware.processors or hardware.cpu_threads
        # Programs that wait for a processor count as well, so that there may be more than processors.
        busy = min(processors, hardware.busy_processors)
        return f"other programs keep {busy:.1f} of {processors} processors busy now"
    return f"other programs use the GPU for {gpu.busy_fraction:.0%} of the time now"


def load_beside(
    *, own: float, waited: float | None, taken: float, processors: int, threads: int
) -> float:
    """Return how much longer a training took beside programs that took so many processors from it all the time.

    `own` is how many it kept busy itself, `waited` for how many more its threads were ready on average, None where the
    system does not tell: then it is taken to have wanted one for each thread, unless some were left over.
    """
    if waited is not None:
        return 1 + waited / max(own, 1 / threads)
    if own + taken < processors - _LEFT_OVER:
        return 1.0
    left = max(processors - taken, 1 / threads)
    return max(1.0, threads / left)


def pace_here(
    hardware: Hardware, *, gpu: Gpu | None, past: Sequence[PastRun], kind: RunKind
) -> Pace:
    """Return what corrects a prediction for this machine, the runs of the nearest kind; and what else runs now."""
    of_base = [run for run in past if run.kind.tells_of(kind)]
    nearest = min((run.kind.distance(kind) for run in of_base), default=0)
    like_it = tuple(run for run in of_base if run.kind.distance(kind) == nearest)[-_KEPT:]
    known_cores = [run.cores for run in like_it if run.cores is not None]
    load = load_factor(hardware, gpu, cores=median(known_cores) if known_cores else None)
    return Pace(
        past=like_it,
        is_same_kind=nearest == 0,
        load=load,
        busy=f"{others_text(hardware, gpu)}; beside them it takes about {load:.1f} times as long",
    )


def known_runs(
    cache_root: Path, hardware: Hardware, *, gpu: Gpu | None, family: str
) -> tuple[PastRun, ...]:
    """Return the last finished runs of a family on this device, of each kind the newest last. Never raises."""
    table = MemoTable.load(cache_root, _TABLE, _VERSION)
    return _runs_of(table.get(_key(hardware, gpu, family)))


def known_counts(
    cache_root: Path, hardware: Hardware, *, gpu: Gpu | None, families: Sequence[str]
) -> dict[str, int]:
    """Return how many finished runs of each family are known on this device, without the families of none."""
    table = MemoTable.load(cache_root, _TABLE, _VERSION)
    counts = {name: len(_runs_of(table.get(_key(hardware, gpu, name)))) for name in families}
    return {name: count for name, count in counts.items() if count}


def _runs_of(entry: str | None) -> tuple[PastRun, ...]:
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        runs = [_of_row(row) for row in json.loads(entry or "[]")]
        return tuple(run for run in runs if _is_sound(run))
    return ()


def remember_run(
    cache_root: Path, hardware: Hardware, run: PastRun, *, gpu: Gpu | None, family: str
) -> None:
    """Note how a finished run went; raises MachineError for a disk that refuses."""
    runs = (*known_runs(cache_root, hardware, gpu=gpu, family=family), run)
    of_its_kind = [each for each in runs if each.kind == run.kind][-_KEPT:]
    others = [each for each in runs if each.kind != run.kind]
    table = MemoTable.load(cache_root, _TABLE, _VERSION)
    rows = [_as_row(each) for each in (*others, *of_its_kind)]
    table.put(_key(hardware, gpu, family), json.dumps(rows))
    table.save()


def _as_row(run: PastRun) -> dict[str, Any]:
    return {
        "priority": run.kind.priority,
        "resolution_px": run.kind.resolution_px,
        "parameters": run.kind.parameters,
        "slower": {part: round(factor, 4) for part, factor in run.slower.items()},
        "load": round(run.load, 3),
        **({} if run.cores is None else {"cores": round(run.cores, 2)}),
    }


def _of_row(row: Mapping[str, Any]) -> PastRun:
    """Return a row of the table as a run; raises ValueError, TypeError, KeyError or AttributeError for damage."""
    return PastRun(
        kind=RunKind(
            priority=str(row["priority"]),
            resolution_px=int(row["resolution_px"]),
            parameters=int(row["parameters"]),
        ),
        slower={str(part): float(factor) for part, factor in row["slower"].items()},
        load=float(row["load"]),
        cores=float(row["cores"]) if "cores" in row else None,
    )


def _is_sound(run: PastRun) -> bool:
    return (
        STEPS in run.slower
        and all(0 < factor < math.inf for factor in run.slower.values())
        and 1 <= run.load < math.inf
        and (run.cores is None or 0 < run.cores < math.inf)
    )


def _key(hardware: Hardware, gpu: Gpu | None, family: str) -> str:
    device = (
        f"{gpu.name}, {gpu.total_bytes}" if gpu else f"{hardware.cpu_name}, {hardware.cpu_threads}"
    )
    return f"{device}, {family}, torch {hardware.packages.get('torch')}"
