"""Traces every public release of the registered families and writes the planner's cost table.

`python scripts/write_cost_tables.py [FAMILY ...] [--release NAME] [--anew]`: what is missing or of an
older VERSION, or everything again. A minute or two a release on one thread: networks are built on `meta`,
without weights, and with three or four blocks of a kind, as every block more costs the same (equal to
the byte for Z-Image's thirty).
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import diffusers

from lora_trainer import families
from lora_trainer.config.config import CHECKPOINTING, Checkpointing
from lora_trainer.costs.sample_cost import SampleCost, Targets, Workload
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.flow import FlowFamily
from lora_trainer.tracing.cost_table import (
    FILE,
    KIB,
    MEGA,
    POINTS,
    TARGETS,
    Case,
    built_shapes,
    case_of,
    configuration,
    entry,
    traced,
)

VERSION = 3
"""Raised when the same workload costs something else: what was traced before is traced again."""
FEW: tuple[Checkpointing, ...] = ("none", "full")
KINDS: Mapping[tuple[int, bool], tuple[Checkpointing, ...]] = {
    (2, False): CHECKPOINTING,
    (4, False): FEW,
    (2, True): FEW,
}
"""What is traced, by bytes of an element and whether the adapter is wide, as DoRA's.

GPUs compute in 16 bits, and most train a plain LoRA: only there is the choice of kinds wide.
"""
COUNTS = ("num_layers", "num_single_layers", "n_layers")
"""Keys of a configuration that count equal blocks."""
UNEQUAL = "dual_attention_layers"
"""Key that names blocks unlike the others; a network with such is traced whole."""
FEW_BLOCKS = 3
INDEXED = re.compile(r"(.*?\.)(\d+)\.(.*)")


def main() -> None:
    """Add what is missing in the table, release by release; it can be stopped and started again."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("families", nargs="*", default=[*families.MODULES])
    options.add_argument("--release", help="only the release of this name")
    options.add_argument("--anew", action="store_true", help="trace again what is there already")
    asked = options.parse_args()
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    for name in asked.families:
        family = families.family(name)
        if isinstance(family, FlowFamily):
            rows = table.get(name, {"releases": []})["releases"]
            bases = list(architectures(family))
            done: list[dict[str, Any]] = []
            for number, facts in enumerate(bases, start=1):
                before = row_of(rows, facts)
                if asked.release in (None, facts.source):
                    known = {} if before is None or asked.anew else before["costs"]
                    done.append(release_table(family, facts, known=known))
                elif before is not None:
                    done.append(before)
                rest = (row_of(rows, later) for later in bases[number:])
                table[name] = {
                    "defaults": defaults(family),
                    "releases": [*done, *(row for row in rest if row is not None)],
                }
                FILE.write_text(written(dict(sorted(table.items()))) + "\n", encoding="utf-8")


def defaults(family: FlowFamily) -> dict[str, Any]:
    """Return what diffusers takes for the keys that a configuration leaves out."""
    parameters = inspect.signature(getattr(diffusers, family.denoiser_class).__init__).parameters
    return configuration(
        {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter.empty
        }
    )


def architectures(family: FlowFamily) -> Iterator[BaseFacts]:
    """Yield the first release of each architecture of a family."""
    seen: list[Any] = []
    for source in (name for release in family.releases for name in release.ids):
        facts = family.facts_from_hub_id(source)
        assert facts is not None
        key = [configuration(facts.architecture), facts.max_tokens]
        if key not in seen:
            seen.append(key)
            yield facts


def row_of(rows: Sequence[dict[str, Any]], facts: BaseFacts) -> dict[str, Any] | None:
    """Return what the table has of a release's architecture."""
    wanted = (configuration(facts.architecture), facts.max_tokens)
    return next((row for row in rows if (row["config"], row["max_tokens"]) == wanted), None)


def release_table(
    family: FlowFamily, facts: BaseFacts, *, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of a release, its modules and its traces by dtype and targets."""
    started = time.monotonic()
    config = configuration(facts.architecture)
    costs: dict[str, Any] = {}
    for size, wide in KINDS:
        key = entry(size, wide=wide)
        found = known.get(key, {})
        costs[key] = {
            targets: traces(
                family,
                facts,
                element_bytes=size,
                wide=wide,
                targets=targets,
                known=found.get(targets, {}),
            )
            for targets in TARGETS
        }
    print(f"{facts.source}: {time.monotonic() - started:.0f} s", flush=True)
    return {
        "name": facts.source,
        "config": config,
        "max_tokens": facts.max_tokens,
        "modules": modules(case_of(family, facts)),
        "costs": costs,
    }


def traces(
    family: FlowFamily,
    facts: BaseFacts,
    *,
    element_bytes: int,
    wide: bool,
    targets: Targets,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Trace all points with each kind of checkpointing that is not in `known`, or is out of date there."""
    varies = case_of(family, facts).text_varies
    points = [point for point in POINTS if varies or not point.short_text]

    def costs(kind: Checkpointing) -> list[SampleCost]:
        found = []
        for point in points:
            workload = point.workload(
                element_bytes=element_bytes, wide=wide, targets=targets, checkpointing=kind
            )
            found.append(cost(family, facts, workload))
        return found

    kinds = KINDS[element_bytes, wide]
    table = dict(known) if known.get("version") == VERSION else {}
    for kind in kinds:
        if kind in table:
            continue
        found = costs(kind)
        table[kind] = step_table(found)
        if kind == "none":
            table["forward_kib"] = [in_kib(cost.forward_bytes) for cost in found]
            table["forward_mflop"] = [round(cost.forward_flops / MEGA) for cost in found]
        if kind == "offloaded":  # where the inputs of blocks lie changes no work
            for name in ("step_mflop", "kernels"):
                assert table[kind].pop(name) == table["full"][name]
    order = ("forward_kib", "forward_mflop", *kinds)
    return {"version": VERSION, **{name: table[name] for name in order}}


def cost(family: FlowFamily, facts: BaseFacts, workload: Workload) -> SampleCost:
    """Return the cost of a release, from networks with few of its blocks."""
    given = facts.architecture
    if given.get(UNEQUAL):
        return traced(case_of(family, facts, text_tokens=workload.text_tokens), workload)

    def of(**counts: int) -> dict[str, int]:
        fewer = replace(facts, architecture={**given, **counts})
        found = traced(case_of(family, fewer, text_tokens=workload.text_tokens), workload)
        # The peak, and what is temporary at it, may lie elsewhere with more blocks; their sum grows evenly.
        return {**asdict(found), "temporary_bytes": found.saved_bytes + found.temporary_bytes}

    wanted = {key: int(given[key]) for key in COUNTS if given.get(key)}
    few = dict.fromkeys(wanted, FEW_BLOCKS)
    total = least = of(**few)
    for key, count in wanted.items():
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


def modules(case: Case) -> list[Any]:
    """Return [prefix, first, count, {name: [fan_in, out, least targets]}] of each run of equal blocks."""
    least = {
        name: (*shape, targets)
        for targets in reversed(TARGETS)
        for name, shape in built_shapes(case, targets).items()
    }
    blocks: dict[tuple[str, int], dict[str, Any]] = {}
    for name in built_shapes(case, TARGETS[-1]):
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


def written(value: Any, depth: int = 0) -> str:
    """Return JSON with mappings over several lines and lists in one."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = "\n" + " " * (depth + 1)
    items = (f"{inner}{json.dumps(key)}: {written(item, depth + 1)}" for key, item in value.items())
    return "{" + ",".join(items) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main()
