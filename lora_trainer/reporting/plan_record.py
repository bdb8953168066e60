"""The plan of a training as a file has it: `lora-train plan --json`, and `plan` in run.json.

One class for each part, with its fields in the order of the file; `run/plan_text.py` writes it, the GUI and the report
read it. A plan of another release, or a damaged one, is read as common/records.py says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_trainer.common.records import NEEDED, ONLY_IF_ANY


@dataclass(frozen=True, kw_only=True)
class SettingRecord:
    """A setting that the plan decided or kept."""

    value: object
    origin: str
    """Who decided it: `command line`, `config FILE`, `preset NAME`, `planner` and the like."""
    reason: str
    """Empty where the origin has none."""


@dataclass(frozen=True, kw_only=True)
class MemoryItemRecord:
    """One item of the planned memory."""

    name: str
    """`runtime` is what the libraries take beside the allocator."""
    bytes: float
    note: str
    """How it was counted, for people; may be empty."""


@dataclass(frozen=True, kw_only=True)
class HostMemoryRecord:
    """The planned memory of the machine beside a GPU."""

    items: Sequence[MemoryItemRecord]
    bytes: float
    """The peak."""
    limit_bytes: float


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The planned memory of the device that trains."""

    items: Sequence[MemoryItemRecord]
    """What the peak consists of."""
    phase: str
    """The phase with the peak."""
    phases: Mapping[str, float]
    """The peak of each phase."""
    by_phase: Mapping[str, Sequence[MemoryItemRecord]]
    peak_bytes: float
    limit_bytes: float
    fits: bool | None
    images_at_once: Mapping[str, int] = field(metadata=NEEDED)
    """The planned micro-batch by "WIDTHxHEIGHT" of the bucket."""
    host: HostMemoryRecord | None
    """None where the device is the machine itself."""

    @property
    def runtime_bytes(self) -> float:
        """What the libraries take on the device, which its allocator does not see; 0 where it is not known."""
        sizes = (item.bytes for item in self.items if item.name == "runtime")
        return math.fsum(size for size in sizes if math.isfinite(size))


@dataclass(frozen=True, kw_only=True)
class TimeRecord:
    """The length of the training, and how long it takes."""

    steps: int | None
    epochs: float
    images: int
    """Images that are trained on."""
    held_out: int
    """Images of the validation."""
    seconds_per_step: Sequence[float]
    """The shortest and the longest."""
    run_s: Sequence[float]
    """The shortest and the longest time of all of it."""
    parts_s: Mapping[str, Sequence[float]]
    """The same for each of its parts."""
    note: str
    """What the estimate rests on, for people."""
    source: str
    """Where it comes from, for people: finished runs of this machine, or arithmetic alone."""
    corrections: Sequence[str]
    """What of it is known of this machine, for people."""
    beside_others: float
    """How many times as long it takes beside the programs that ran when it was planned; 0 in earlier versions."""
    regularisation_per_epoch: float
    """Images of regularisation in an epoch."""

    @property
    def range_s(self) -> tuple[float, float] | None:
        """The shortest and the longest time of all of it, None where it is not known."""
        ends = [end for end in self.run_s if math.isfinite(end)]
        return (ends[0], ends[1]) if len(ends) == 2 else None


@dataclass(frozen=True, kw_only=True)
class SamplingRecord:
    """The samples on the way."""

    prompts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ProcessesRecord:
    """The processes of the training."""

    count: float
    images: Sequence[float]
    """Images of a step, for each process."""


@dataclass(frozen=True, kw_only=True)
class RemarkRecord:
    """A warning about the planned training."""

    kind: str
    what: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan."""

    family: str
    base: str
    """What the user named: an id of the Hub or a path."""
    tier: str
    """The preset's row for the memory of this machine."""
    priority: str
    preset: str
    settings: Mapping[str, SettingRecord] = field(metadata=ONLY_IF_ANY)
    """Every setting by `section.key`; run.json has them beside the plan."""
    memory: MemoryRecord = field(metadata=NEEDED)
    time: TimeRecord
    sampling: SamplingRecord
    disk: Mapping[str, float]
    """Bytes by what they are for."""
    processes: ProcessesRecord
    remarks: Sequence[RemarkRecord]
    images: Mapping[str, int]
    """`all` of them, and for each kind of warning how many have it."""
    timesteps: Sequence[float]
    """The share of the timesteps that are drawn in each of equal parts of 0 (no noise) to 1000 (noise alone)."""

    def value(self, key: str) -> Any:
        """Return the value of a setting, None where the plan does not have it."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value
