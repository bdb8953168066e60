"""Traces every public release of the registered families and writes the planner's cost table.

`python scripts/write_cost_tables.py [FAMILY ...]`: all, or these anew beside the others. Minutes on
one thread; the networks are built on `meta`, so no weights and little memory are needed.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import diffusers

from lora_trainer import families
from lora_trainer.config import CHECKPOINTING, Checkpointing
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.cost_curves import POINTS
from lora_trainer.families.cost_table import (
    FILE,
    KIB,
    MEGA,
    TARGETS,
    Case,
    built_shapes,
    case_of,
    configuration,
    traced,
)
from lora_trainer.families.costs import SampleCost, Targets
from lora_trainer.families.flow import FlowFamily

ELEMENT_BYTES = (2, 4)
INDEXED = re.compile(r"(.*?\.)(\d+)\.(.*)")


def main() -> None:
    """Write the table, family by family."""
    for name in sys.argv[1:] or families.MODULES:
        family = families.family(name)
        if isinstance(family, FlowFamily):
            found = family_table(family)
            table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
            FILE.write_text(written(dict(sorted({**table, name: found}.items()))) + "\n", "utf-8")


def family_table(family: FlowFamily) -> dict[str, Any]:
    """Trace each architecture among a family's releases once."""
    parameters = inspect.signature(getattr(diffusers, family.denoiser_class).__init__).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
    releases: list[dict[str, Any]] = []
    for source in (name for release in family.releases for name in release.ids):
        facts = family.known(source)
        assert facts is not None
        config = configuration(facts.architecture)
        if not any(
            (found["config"], found["max_tokens"]) == (config, facts.max_tokens)
            for found in releases
        ):
            releases.append(release_table(family, facts))
    return {"defaults": configuration(defaults), "releases": releases}


def release_table(family: FlowFamily, facts: BaseFacts) -> dict[str, Any]:
    """Return the configuration of a release, its modules and its traces by dtype and targets."""
    started = time.monotonic()
    costs = {
        str(element_bytes): {
            targets: traces(family, facts, element_bytes=element_bytes, targets=targets)
            for targets in TARGETS
        }
        for element_bytes in ELEMENT_BYTES
    }
    print(f"{facts.source}: {time.monotonic() - started:.0f} s", flush=True)
    return {
        "name": facts.source,
        "config": configuration(facts.architecture),
        "max_tokens": facts.max_tokens,
        "modules": modules(case_of(family, facts)),
        "costs": costs,
    }


def traces(
    family: FlowFamily, facts: BaseFacts, *, element_bytes: int, targets: Targets
) -> dict[str, Any]:
    """Trace all points with each kind of checkpointing."""
    varies = case_of(family, facts).text_varies
    costs: dict[Checkpointing, list[SampleCost]] = {kind: [] for kind in CHECKPOINTING}
    for point in POINTS:
        if point.short_text and not varies:
            continue
        for kind, found in costs.items():
            workload = point.workload(
                element_bytes=element_bytes, targets=targets, checkpointing=kind
            )
            case = case_of(family, facts, text_tokens=workload.text_tokens)
            found.append(traced(case, workload))
    steps: dict[str, Any] = {kind: step_table(found) for kind, found in costs.items()}
    # Where the inputs of blocks lie changes no work.
    for name in ("step_mflop", "kernels"):
        assert steps["offloaded"].pop(name) == steps["full"][name]
    return {
        "forward_kib": [in_kib(cost.forward_bytes) for cost in costs["none"]],
        "forward_mflop": [round(cost.forward_flops / MEGA) for cost in costs["none"]],
        **steps,
    }


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
