"""Everything a plan is made from, and out-of-memory records of earlier runs. No torch.

A prediction cannot see all memory that a driver or an allocator adds, so a GPU on which a planned run ran out of
memory is planned to use less: a table of the memo in the cache folder has an entry for each GPU model, family and
version of torch, as another one of these may need less. An entry can only make a plan smaller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_trainer.common.memo import MemoTable
from lora_trainer.config.layers import Resolved
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.known_convolutions import FastestWay, steps_alike
from lora_trainer.planning.known_pace import PastRun


def area_of(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the pixels of images of these sizes together."""
    return sum(width_px * height_px for width_px, height_px in sizes)


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Everything a plan is made from. `images` counts the different training images.

    `decided` has (value, reason) of the settings that base and captions decide alone: `output.format` always.

    `samples_per_epoch` counts repeats, at least `fewest_repeats` of each image, without regularisation;
    `regularisation_per_epoch` comes on top. `buckets` are the (width, height) in use, in pixels, of all
    images, held-out ones too; `buckets_by_side` those at another `data.resolution`, by its pixels. `references` are
    the sizes of the reference images of an image of a bucket, those with the most pixels together. `latents`
    counts reference images too, and mirrored images twice, `texts` the different captions, `prompts`
    those of the sample images. `full_card` is an out-of-memory record of this GPU. `processes` share each
    step, `sharing` of them one machine's memory. `kept_at_once` is the micro-batch by bucket of a resumed
    run, which keeps its plan. `directions` are those of a slider from words, and `keeping` the share of them with
    prompts to keep; `pairs` are the pairs of images of a slider from images. `held_out_count` counts images held out
    for validation. `past_runs` are finished runs of this family on this device, which correct the predicted time.
    `fastest_ways` are what earlier runs found of the convolutions of this family on this card, by `steps_alike`.
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
    buckets_by_side: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    references: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    full_card: OomRecord | None = None
    processes: int = 1
    sharing: int = 1
    kept_at_once: Mapping[tuple[int, int], int] | None = None
    regularisation_per_epoch: int = 0
    held_out_count: int = 0
    directions: int = 0
    keeping: float = 0.0
    pairs: int = 0
    past_runs: tuple[PastRun, ...] = ()
    fastest_ways: Mapping[str, FastestWay] = field(default_factory=dict)

    @cached_property
    def costs(self) -> BaseCosts:
        """The costs of the base."""
        return BaseCosts(family=self.family, facts=self.facts)

    def changed(self, **values: Any) -> PlanInput:
        """Return the input of another run on the same base, whose costs are not counted anew."""
        other = replace(self, **values)
        vars(other)["costs"] = self.costs
        return other

    def fastest_way(self, config: Config | RunConfig) -> FastestWay | None:
        """Return which way of computing convolutions was the fastest in steps like these, None: nobody knows."""
        return self.fastest_ways.get(steps_alike(config))

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
        return self.hardware.usable_ram_bytes // self.sharing


_TABLE = "out of memory"
# The next plan may use this share of the peak of a plan that ran out of memory.
BELOW = 0.95
# A plan for a smaller share of its limit did not fail by its prediction: another program took memory too.
PLAUSIBLE = 0.7


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
