"""Everything a plan is made from, out-of-memory records of earlier runs, and the judge of a load. No torch.

A prediction cannot see all memory that a driver or an allocator adds, so a GPU on which a planned run ran out of
memory is planned to use less: a table of the memo in the cache folder has an entry for each GPU model, family and
version of torch, as another one of these may need less. An entry can only make a plan smaller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_trainer.common.memo import MemoTable
from lora_trainer.common.wording import GIB, gib
from lora_trainer.config.declare import Precision, settled
from lora_trainer.config.layers import Resolved
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.base import Family
from lora_trainer.families.facts import BaseFacts
from lora_trainer.hardware.machine import Hardware, usable_ram_bytes
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import HostPrediction, Load, Prediction, predict, predict_host
from lora_trainer.planning.step_time import StepTime, StepWork, step_time, step_work


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Everything a plan is made from. `images` counts the different training images.

    `decided` has (value, reason) of the settings that base and captions decide alone: `output.format` always.

    `samples_per_epoch` counts repeats, at least `fewest_repeats` of each image, without regularisation;
    `regularisation_per_epoch` comes on top. `buckets` are the (width, height) in use, in pixels, of all
    images, held-out ones too. `latents` counts mirrored images twice, `texts` the different captions, `prompts`
    those of the sample images. `full_card` is an out-of-memory record of this GPU. `processes` share each
    step, `sharing` of them one machine's memory. `kept_at_once` is the micro-batch by bucket of a resumed
    run, which keeps its plan. `held_out_count` counts images held out for validation.
    """

    resolved: Resolved
    decided: Mapping[str, tuple[Any, str]]
    facts: BaseFacts
    family: Family
    hardware: Hardware
    images: int
    samples_per_epoch: int
    buckets: Sequence[tuple[int, int]]
    latents: int
    texts: int
    prompts: int
    fewest_repeats: int = 1
    full_card: OomRecord | None = None
    processes: int = 1
    sharing: int = 1
    kept_at_once: Mapping[tuple[int, int], int] | None = None
    regularisation_per_epoch: int = 0
    held_out_count: int = 0

    @cached_property
    def costs(self) -> BaseCosts:
        """The costs of the base."""
        return BaseCosts(family=self.family, facts=self.facts)

    @property
    def epoch(self) -> int:
        """Samples of an epoch, with regularisation."""
        return self.samples_per_epoch + self.regularisation_per_epoch

    @property
    def pinnable_bytes(self) -> int | None:
        """Host memory that each process of this training may pin, in bytes; None: no limit."""
        limit_bytes = self.hardware.pinnable_bytes
        return None if limit_bytes is None else limit_bytes // self.sharing

    @property
    def ram_bytes(self) -> int:
        """The machine's memory that each process may use."""
        total_bytes, free_bytes = self.hardware.ram_total_bytes, self.hardware.ram_free_bytes
        return usable_ram_bytes(total_bytes=total_bytes, free_bytes=free_bytes) // self.sharing


_TABLE = "out of memory"
BELOW = 0.95
"""The next plan may use this share of the peak of a plan that ran out of memory."""
PLAUSIBLE = 0.7
"""A plan for a smaller share of its limit did not fail by its prediction: another program took memory too."""


@dataclass(frozen=True)
class OomRecord:
    """An out-of-memory record: plans may use `share` of the GPU's free memory, because of a run `on` a date."""

    share: float
    on: str

    def __str__(self) -> str:
        return f"only {self.share:.0%} of it used, because a run ran out of memory on {self.on}"


def known_oom(cache_root: Path, hardware: Hardware, family: str) -> OomRecord | None:
    """Return the out-of-memory record of the GPU that a run would use, None without one."""
    table = MemoTable.load(cache_root, _TABLE)
    entry = table.get(_key(hardware, family)) if hardware.gpus else None
    return None if entry is None else OomRecord(*json.loads(entry))


def remember_oom(
    cache_root: Path, hardware: Hardware, family: str, *, planned_bytes: int, limit_bytes: int
) -> OomRecord | None:
    """Note that a plan for `planned_bytes` of `limit_bytes` ran out of memory; raises MachineError.

    `limit_bytes` is the memory that was free or allowed. Returns the record that later plans will
    follow, None when the plan was too far below its limit to be at fault.
    """
    # Else one run beside a game would make all later runs on this GPU slower for good.
    if planned_bytes < PLAUSIBLE * limit_bytes:
        return None
    record = OomRecord(
        # Of the plan, not of the limit: the limit may have had room that the plan did not use.
        share=round(BELOW * min(planned_bytes / limit_bytes, 1.0), 4),
        on=datetime.now(UTC).date().isoformat(),
    )
    earlier = known_oom(cache_root, hardware, family)
    # The smallest share wins, as a run that was planned for less has failed as well.
    if earlier is not None and earlier.share <= record.share:
        return earlier
    table = MemoTable.load(cache_root, _TABLE)
    table.put(_key(hardware, family), json.dumps([record.share, record.on]))
    table.save()
    return record


def _key(hardware: Hardware, family: str) -> str:
    # Torch's version too, because another version has other kernels and other workspaces.
    card = (hardware.usable() or hardware.gpus)[0]
    return f"{card.name}, {card.total_bytes}, {family}, torch {hardware.packages.get('torch')}"


# ---- a load on this machine


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bytes that may be used, and the reason, worded to follow a size in a sentence."""

    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{gib(self.bytes)} {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Judges a load on this machine: device memory, host memory, time of a step, and the price to compare by.

    Of `config` only memory's settings may be `auto`; `gpu` None is the processor.
    """

    inputs: PlanInput
    config: Config | RunConfig
    gpu: Gpu | None

    @property
    def costs(self) -> BaseCosts:
        return self.inputs.costs

    @property
    def priority(self) -> str:
        return self.inputs.resolved.priority

    @property
    def batch_size(self) -> int:
        """The most images of a step that one process trains on: the slowest process sets the pace."""
        return math.ceil(self.config.train.batch_size / self.inputs.processes)

    @property
    def has_host(self) -> bool:
        """Whether the device has memory of its own, so that weights can wait in the machine's memory."""
        return self.gpu is not None and self.gpu.can.own_memory

    @cached_property
    def limit(self) -> Limit:
        """Memory of the device that the run may use: free memory or the user's limit, whichever is less.

        With an out-of-memory record of this GPU, only the recorded share of it.
        """
        limit_gib, full_card = self.config.hardware.vram_limit_gib, self.inputs.full_card
        if self.gpu is None:
            return Limit(bytes=self.inputs.ram_bytes, reason="of memory free, less a margin")
        size, reason = self.gpu.free_bytes, f"free on {self.gpu.name}"
        if limit_gib is not None and limit_gib * GIB < size:
            size, reason = int(limit_gib * GIB), "allowed by hardware.vram_limit_gib"
        if full_card is None:
            return Limit(bytes=size, reason=reason)
        usable_bytes = int(size * full_card.share)
        return Limit(bytes=usable_bytes, reason=f"({gib(size)} {reason}; {full_card})")

    def predict(self, load: Load) -> Prediction:
        return predict(load, self.costs, limit_bytes=self.limit.bytes)

    def predict_host(self, load: Load) -> HostPrediction | None:
        if not self.has_host:
            return None  # `predict` counts everything already
        limit_bytes, pinnable_bytes = self.inputs.ram_bytes, self.inputs.pinnable_bytes
        return predict_host(
            load, self.costs, limit_bytes=limit_bytes, pinnable_bytes=pinnable_bytes
        )

    def time(self, load: Load) -> StepTime:
        pinnable_bytes = self.inputs.pinnable_bytes
        work = step_work(
            load, self.costs, batch_size=self.batch_size, pinnable_bytes=pinnable_bytes
        )
        return self.time_of(work, load.precision)

    def time_of(self, work: StepWork, precision: Precision) -> StepTime:
        threads = settled(self.config.hardware.threads)
        return step_time(work, gpu=self.gpu, threads=threads, precision=precision)

    def fits(self, load: Load) -> bool:
        """Say whether the device and the machine can hold a load."""
        host = self.predict_host(load)
        return self.predict(load).fits and (host is None or host.fits)
