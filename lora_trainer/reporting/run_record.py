"""run.json: what a run is and how it was planned, one class for each part of the file.

The fields stand in the order of the file; `run/lead.py` writes it. Pages and reports `read` whatever of it is there.
A resume cannot do without the fields that are marked NEEDED, and asks for them first (`run_folder.read_run`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.common.records import NEEDED, NEEDED_IF_THERE, as_json, of_json
from lora_trainer.config.layers import Origin
from lora_trainer.reporting.plan_record import PlanRecord

RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The base of a run."""

    family: str
    source: str = field(metadata=NEEDED)
    """What the user named: an id of the Hub or a path."""
    path: str
    """The name of its file or folder, without where it lies."""
    identities: Mapping[str, str] = field(metadata=NEEDED)
    """The checksum of each of its parts."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentRecord:
    """The machine and the programs of a run."""

    exactness: Mapping[str, Any] = field(metadata=NEEDED)
    """What rounding depends on, such as torch's version, by name."""
    rest: Mapping[str, Any]
    """Python, the allocator's settings and `doctor --json`."""


@dataclass(frozen=True, kw_only=True)
class FindingRecord:
    """A finding of `check` on the dataset."""

    kind: str
    """Its kind of fault in one word, as `check --json` has it."""
    severity: str
    """error, warning or note."""
    file: str | None
    """None for one on the whole dataset."""
    what: str
    advice: str
    code: str
    """A code of docs/faults.md; may be empty."""


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """The dataset of a run: `check --json` without the single images, and what was made of it."""

    images: float
    score: float
    """0 to 1."""
    parts: Mapping[str, float]
    """What the score consists of, each 0 to 1."""
    findings: Sequence[FindingRecord]
    buckets: Mapping[str, float]
    """Images per epoch by "WIDTHxHEIGHT", repeats included."""
    name: str
    """Of its folder, without where it lies."""
    fingerprint: str = field(metadata=NEEDED)
    """Of its images and captions."""
    held_out: Sequence[str] = field(metadata=NEEDED_IF_THERE)
    """The names of the images of the validation."""

    @property
    def is_known(self) -> bool:
        """Whether the run came so far that it recorded its dataset."""
        return bool(self.name or self.fingerprint or math.isfinite(self.images))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as it began or was last resumed."""

    name: str = field(metadata=NEEDED)
    version: str
    """The release of lora-train."""
    command: Sequence[str]
    """The words typed, without secrets."""
    started_at_s: float = field(metadata=NEEDED)
    """Unix time of its first start."""
    settings: Mapping[str, Any] = field(metadata=NEEDED)
    """Every setting by `section.key`."""
    origins: Mapping[str, Origin]
    """Who decided each."""
    base: BaseRecord = field(metadata=NEEDED)
    plan: PlanRecord = field(metadata=NEEDED)
    environment: EnvironmentRecord = field(metadata=NEEDED)
    dataset: DatasetRecord = field(metadata=NEEDED)


def write(folder: Path, record: RunRecord) -> None:
    """Write run.json; raises MachineError when the disk refuses it."""
    write_atomic(folder / RUN_FILE, json_bytes(as_json(record)))


def read(folder: Path) -> RunRecord:
    """Return run.json of a folder; raises RequestError where it is missing or not a JSON object."""
    return of_json(RunRecord, read_json_object(folder / RUN_FILE))
