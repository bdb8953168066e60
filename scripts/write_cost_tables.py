"""Traces every public release of the registered families and writes the planner's tables of costs.

`python -m scripts.write_cost_tables [FAMILY ...] [--release NAME] [--anew]`: what is missing or of an
older VERSION, or everything again. A minute or two a release on one thread: networks are built on `meta`,
without weights, and transformers with three or four blocks of a kind, as every block more costs the same
(equal to the byte for Z-Image's thirty). U-Nets are traced whole, which takes half an hour for SDXL.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import diffusers

import lora_trainer
from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING, TARGETS, Checkpointing, Targets
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import (
    KIB,
    MEGA,
    RANKS,
    REFERENCE_ROW,
    SampleCost,
    Workload,
    entry,
)
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.flow import FlowFamily
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.tables import made_tables
from scripts.made_tables import write_made

VERSION = 3
"""Raised when the same workload costs something else: what was traced before is traced again."""
FEW: tuple[Checkpointing, ...] = ("none", "full")
Kinds = Mapping[tuple[int, bool], tuple[Checkpointing, ...]]
TRANSFORMER_KINDS: Kinds = {(2, False): CHECKPOINTING, (4, False): FEW, (2, True): FEW}
UNET_KINDS: Kinds = dict.fromkeys(((2, False), (2, True), (4, False), (4, True)), CHECKPOINTING)
"""What is traced, by bytes of an element and whether the adapter is wide, as DoRA's.

GPUs compute in 16 bits, and most runs train a plain LoRA: only there is the choice of levels wide for
transformers. U-Nets train on processors too, and with every kind of adapter.
"""
TRANSFORMER_SIDES_PX = (512, 768, 1024)
SHORT_TEXT_TOKENS = 64
CHUNKED_TEXT_TOKENS = 231
"""Three chunks of CLIP's 77 tokens."""
EMBEDDED = Path(lora_trainer.__file__).with_name("embedded")
COUNTED = re.compile(r"n(?:um)?_(?!refiner|text)(?:\w+_)?layers")
"""Keys of a configuration that count equal blocks; Krea 2's `num_text_layers` counts states of each token."""
UNEQUAL = "dual_attention_layers"
"""Key that names blocks unlike the others; a network with such is traced whole."""
FEW_BLOCKS = 3
INDEXED = re.compile(r"(.*?\.)(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One traced workload: a square image, by default at the smallest rank and alone."""

    side_px: int
    text_tokens: int
    rank: int = RANKS[0]
    micro_batch: int = 1

    def workload(
        self, *, element_bytes: int, wide: bool, targets: Targets, checkpointing: Checkpointing
    ) -> Workload:
        """Return the workload to trace."""
        return Workload(
            height_px=self.side_px,
            width_px=self.side_px,
            element_bytes=element_bytes,
            rank=self.rank,
            targets=targets,
            checkpointing=checkpointing,
            micro_batch=self.micro_batch,
            wide_adapter=wide,
        )


def main() -> None:
    """Add what is missing in the tables, release by release; it can be stopped and started again."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("families", nargs="*", default=[*families.NAMES])
    options.add_argument("--release", help="only the release of this name")
    options.add_argument("--anew", action="store_true", help="trace again what is there already")
    asked = options.parse_args()
    for name in asked.families:
        trace_missing(families.family(name), only=asked.release, anew=asked.anew)


def trace_missing(family: Family, *, only: str | None = None, anew: bool = False) -> None:
    """Trace the releases that the family's table lacks, `only` the one of that name, and write it after each."""
    rows = made_tables(family.name).get("costs", {"releases": []})["releases"]
    bases = list(architectures(family))
    done: list[dict[str, Any]] = []
    for number, facts in enumerate(bases, start=1):
        before = row_of(rows, family, facts)
        if only in (None, facts.source):
            known = {} if before is None or anew else before["costs"]
            done.append(release_table(family, facts, known=known))
        elif before is not None:
            done.append(before)
        rest = (row_of(rows, family, later) for later in bases[number:])
        releases = [*done, *(row for row in rest if row is not None)]
        write_made(family.name, costs={"defaults": defaults(family), "releases": releases})


def missing(family: Family) -> list[str]:
    """Return the names of the releases that the family's table lacks, or has of an older VERSION."""
    rows = made_tables(family.name).get("costs", {"releases": []})["releases"]
    found = [(facts, row_of(rows, family, facts)) for facts in architectures(family)]
    return [
        facts.source
        for facts, row in found
        if row is None
        or not _is_current(row)
        or (REFERENCE_ROW not in row and editing_release(family, facts) is not None)
    ]


def _is_current(row: Mapping[str, Any]) -> bool:
    by_targets = (found for kinds in row["costs"].values() for found in kinds.values())
    return all(found.get("version") == VERSION for found in by_targets)


def defaults(family: Family) -> dict[str, Any]:
    """Return what diffusers takes for the keys that a configuration leaves out; U-Nets' are filled in."""
    if not isinstance(family, FlowFamily):
        return {}
    parameters = inspect.signature(getattr(diffusers, family.traits.class_name).__init__).parameters
    values = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def architectures(family: Family) -> Iterator[BaseFacts]:
    """Yield the first release of each architecture of a family, and the embedded base."""
    seen: list[Any] = []
    sources = [next(iter(family.releases))]
    if isinstance(family, FlowFamily):
        sources = [name for release in family.published for name in release.ids]
    bases = [family.releases[source] for source in sources]
    if family.detect(EMBEDDED):
        embedded = family.facts(Layout(folder=EMBEDDED), source="embedded")
        bases.append(embedded)
    for facts in bases:
        assert facts is not None
        key = [facts.release.network_numbers(), facts.release.max_tokens]
        if key not in seen:
            seen.append(key)
            yield facts


def row_of(
    rows: Sequence[dict[str, Any]], family: Family, facts: BaseFacts
) -> dict[str, Any] | None:
    """Return what the table has of a release's architecture."""
    usual = defaults(family)  # a configuration may state them or leave them out
    wanted = ({**usual, **facts.release.network_numbers()}, facts.release.max_tokens)
    found = (row for row in rows if ({**usual, **row["config"]}, row["max_tokens"]) == wanted)
    return next(found, None)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where a release was traced: three sides of square images, and two lengths of its text.

    The first length is that of a release read without chunks; the second lies below it where texts keep
    their own length, above it where a network reads several chunks, and is 0 where all texts are as long.
    """

    sides_px: tuple[int, int, int]
    text_tokens: tuple[int, int]


def grid_of(family: Family, facts: BaseFacts) -> Grid:
    """Return the points of a base: U-Nets', of many sizes, at half and twice the native side."""
    if isinstance(family, FlowFamily):
        other = SHORT_TEXT_TOKENS if family.text.masked else 0
        return Grid(sides_px=TRANSFORMER_SIDES_PX, text_tokens=(facts.release.max_tokens, other))
    side = 2 ** int(math.log2(facts.resolution_px))
    sides_px = (side // 2, side, 2 * side)
    return Grid(sides_px=sides_px, text_tokens=(facts.release.max_tokens, CHUNKED_TEXT_TOKENS))


def points_of(grid: Grid) -> tuple[Point, ...]:
    """The three sizes, then pairs at the smallest and largest size that change one thing each."""
    usual, other = grid.text_tokens
    ends = (grid.sides_px[0], grid.sides_px[2])
    return (
        *(Point(side_px=side, text_tokens=usual) for side in grid.sides_px),
        *(Point(side_px=side, text_tokens=usual, rank=RANKS[1]) for side in ends),
        *(Point(side_px=side, text_tokens=usual, micro_batch=2) for side in ends),
        *(Point(side_px=side, text_tokens=other) for side in ends if other),
    )


def release_table(family: Family, facts: BaseFacts, *, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a release, its modules and its traces by dtype and targets."""
    started = time.monotonic()
    print(f"{facts.source} is traced, which takes minutes", flush=True)
    costs: dict[str, Any] = {}
    grid = grid_of(family, facts)
    kinds = TRANSFORMER_KINDS if isinstance(family, FlowFamily) else UNET_KINDS
    for (size, wide), levels in kinds.items():
        key = entry(size, wide=wide)
        known_targets = known.get(key, {})
        by_targets = costs.setdefault(key, {})
        for targets in TARGETS:
            endings = family.traits.endings
            # Blocks without modulation: `all` is what `transformer` is.
            same = next((each for each in by_targets if endings[each] == endings[targets]), None)
            by_targets[targets] = (
                by_targets[same]
                if same is not None
                else traces(
                    family,
                    facts,
                    points_of(grid),
                    levels,
                    element_bytes=size,
                    wide=wide,
                    targets=targets,
                    known=known_targets.get(targets, {}),
                )
            )
    print(f"{facts.source}: {time.monotonic() - started:.0f} s", flush=True)
    editing = editing_release(family, facts)
    return {
        "name": facts.source,
        "config": facts.release.network_numbers(),
        "max_tokens": facts.release.max_tokens,
        "sides_px": list(grid.sides_px),
        "text_tokens": list(grid.text_tokens),
        "modules": modules(BaseCosts(family=family, facts=facts)),
        **({} if editing is None else {REFERENCE_ROW: reference_elements(family, editing)}),
        "costs": costs,
    }


def editing_release(family: Family, facts: BaseFacts) -> BaseFacts | None:
    """Return the release of this architecture that reads the most references behind the image, None if none does."""

    def key(each: BaseFacts) -> list[Any]:
        return [each.release.network_numbers(), each.release.max_tokens]

    editing = [
        each
        for each in family.releases.values()
        if each.references is not None
        and not each.references.as_channels
        and key(each) == key(facts)
    ]
    return max(
        editing, key=lambda each: each.references.most if each.references else 0, default=None
    )


def reference_elements(family: Family, facts: BaseFacts) -> float:
    """Return how many elements a pixel of a reference adds to the peak of a pass without gradients.

    By few blocks, as the peak lies within one, and by two references where two are read: layers that only references
    go through are alive with the first.
    """
    assert facts.references is not None
    side_px = TRANSFORMER_SIDES_PX[-1]
    sizes = ((side_px, side_px),) * min(2, facts.references.most)
    few = {
        key: min(int(count), FEW_BLOCKS)
        for key, count in facts.release.architecture.items()
        if COUNTED.fullmatch(key) and count
    }
    facts = facts.for_references()
    release = replace(facts.release, architecture={**facts.release.architecture, **few})
    costs = BaseCosts(family=family, facts=replace(facts, release=release))
    alone = Point(side_px=side_px, text_tokens=0).workload(
        element_bytes=2, wide=False, targets="transformer", checkpointing="none"
    )
    more = costs.traced(replace(alone, references_px=sizes)).forward_bytes
    more -= costs.traced(alone).forward_bytes
    return round(more / (alone.element_bytes * sum(map(math.prod, sizes))), 2)


def traces(
    family: Family,
    facts: BaseFacts,
    points: Sequence[Point],
    levels: Sequence[Checkpointing],
    *,
    element_bytes: int,
    wide: bool,
    targets: Targets,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Trace all points at each checkpointing level that is not in `known`, or is out of date there."""
    table = dict(known) if known.get("version") == VERSION else {}
    bases: dict[str, BaseCosts] = {}
    for level in levels:
        if level in table:
            continue
        costs = [
            cost(
                family,
                facts,
                point.workload(
                    element_bytes=element_bytes, wide=wide, targets=targets, checkpointing=level
                ),
                text_tokens=point.text_tokens,
                bases=bases,
            )
            for point in points
        ]
        table[level] = step_table(costs)
        if level == "none":
            table["forward_kib"] = [in_kib(cost.forward_bytes) for cost in costs]
            table["forward_mflop"] = [round(cost.forward_flops / MEGA) for cost in costs]
        if level == "offloaded":  # where the inputs of blocks lie changes no work
            for name in ("step_mflop", "kernels"):
                assert table[level].pop(name) == table["full"][name]
    order = ("forward_kib", "forward_mflop", *levels)
    return {"version": VERSION, **{name: table[name] for name in order}}


def cost(
    family: Family,
    facts: BaseFacts,
    workload: Workload,
    *,
    text_tokens: int,
    bases: dict[str, BaseCosts],
) -> SampleCost:
    """Return the cost of a release, from networks with few of its blocks; U-Nets have no such counts.

    `bases` keeps those networks for the next workload.
    """
    whole = facts.release.architecture
    if not isinstance(family, FlowFamily):  # a U-Net's cost per sample does not depend on the batch
        workload = replace(workload, micro_batch=1)

    def of(**counts: int) -> dict[str, int]:
        key = f"{counts} {text_tokens}"
        release = replace(facts.release, architecture={**whole, **counts}, max_tokens=text_tokens)
        fewer = replace(facts, release=release, chunks=1)
        traced_cost = bases.setdefault(key, BaseCosts(family=family, facts=fewer)).traced(workload)
        # The peak, and what is temporary at it, may lie elsewhere with more blocks; their sum grows evenly.
        peak = traced_cost.saved_bytes + traced_cost.temporary_bytes
        return {**asdict(traced_cost), "temporary_bytes": peak}

    block_counts = {key: int(n) for key, n in whole.items() if COUNTED.fullmatch(key) and n}
    if whole.get(UNEQUAL):
        block_counts = {}
    few = dict.fromkeys(block_counts, FEW_BLOCKS)
    total = least = of(**few)
    for key, count in block_counts.items():
        more = of(**{**few, key: FEW_BLOCKS + 1})
        total = {
            name: total[name] + (count - FEW_BLOCKS) * (more[name] - least[name]) for name in least
        }
    return SampleCost(
        **{**total, "temporary_bytes": total["temporary_bytes"] - total["saved_bytes"]}
    )


def step_table(costs: Sequence[SampleCost]) -> dict[str, Any]:
    """Return what differs between the kinds, a value per point; nothing for bytes that are all 0."""
    table = {
        "saved_kib": [in_kib(cost.saved_bytes) for cost in costs],
        "adapter_kib": [in_kib(cost.adapter_saved_bytes) for cost in costs],
        "peak_kib": [in_kib(cost.saved_bytes + cost.temporary_bytes) for cost in costs],
        "host_kib": [in_kib(cost.host_bytes) for cost in costs],
        "step_mflop": [round(cost.step_flops / MEGA) for cost in costs],
    }
    return {name: values for name, values in table.items() if any(values)} | {
        "kernels": costs[0].kernels
    }


def in_kib(size_bytes: int) -> int:
    """Return a size rounded up."""
    return math.ceil(size_bytes / KIB)


def modules(costs: BaseCosts) -> list[Any]:
    """Return [prefix, first, count, {name: [fan_in, out, least targets]}] of each run of equal blocks."""
    least = {
        name: (*shape, targets)
        for targets in reversed(TARGETS)
        for name, shape in costs.built_shapes(targets).items()
    }
    blocks: dict[tuple[str, int], dict[str, Any]] = {}
    for name in costs.built_shapes(TARGETS[-1]):
        prefix, index, rest = INDEXED.fullmatch(name).groups()  # type: ignore[union-attr]
        blocks.setdefault((prefix, int(index)), {})[rest] = least[name]
    runs: list[Any] = []
    for (prefix, index), block in blocks.items():
        last = runs[-1] if runs else None
        if last and (prefix, index, list(block.items())) == (last[0], last[1] + last[2], last[4]):
            last[2] += 1
        else:
            runs.append([prefix, index, 1, block, list(block.items())])
    return [run[:4] for run in runs]


if __name__ == "__main__":
    main()
