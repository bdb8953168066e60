"""What a flow-matching transformer costs: from a shipped table of traces, else traced on the spot.

Inputs are a family, the facts of a base and a workload; outputs the planner's `SampleCost` and the
sizes of adapters. Architectures in the table need no torch. `scripts/write_cost_tables.py` makes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base import BaseFacts
from lora_trainer.families.cost_curves import bytes_at, flops_at
from lora_trainer.families.costs import TARGET_GROUPS, SampleCost, Targets, Workload

if TYPE_CHECKING:
    from lora_trainer.families.flow import FlowFamily
    from lora_trainer.model.trace import TracedNetwork

FILE = Path(__file__).with_name("cost_tables.json")
KIB = 1024
MEGA = 10**6
TARGETS: tuple[Targets, ...] = tuple(TARGET_GROUPS)
"""From the fewest modules to the most; each has those of the one before."""


def sample_cost(family: FlowFamily, facts: BaseFacts, workload: Workload) -> SampleCost:
    """Return memory and FLOPs of one sample; an unknown architecture is traced, once per workload."""
    case = case_of(family, facts, text_tokens=workload.text_tokens)
    release = _release(facts)
    if release is None or str(workload.element_bytes) not in release["costs"]:
        cost = traced(case, workload)
    else:
        cost = _tabled(release, workload)
    return replace(cost, conditioning_bytes=case.conditioning_bytes)


def adapter_shapes(
    family: FlowFamily, facts: BaseFacts, *, targets: Targets
) -> Mapping[str, tuple[int, int]]:
    """Return (fan_in, out) of each module that gets an adapter, in module order."""
    release = _release(facts)
    if release is None:
        return built_shapes(case_of(family, facts), targets)
    wanted = TARGETS[: TARGETS.index(targets) + 1]
    return {
        f"{prefix}{index}.{name}": (fan_in, out)
        for prefix, first, count, modules in release["modules"]
        for index in range(first, first + count)
        for name, (fan_in, out, least) in modules.items()
        if least in wanted
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A base as far as its costs go, told apart by `key`, with the shapes of one encoded prompt."""

    key: str
    family: FlowFamily = field(compare=False)
    facts: BaseFacts = field(compare=False)
    prompt: Mapping[str, tuple[int, ...]] = field(compare=False)

    @property
    def conditioning_bytes(self) -> int:
        """Bytes of one encoded prompt as it is cached: float32, masks int64."""
        sizes = {name: math.prod(shape) for name, shape in self.prompt.items()}
        return sum(size * (8 if name.endswith("mask") else 4) for name, size in sizes.items())

    @property
    def text_varies(self) -> bool:
        """Whether texts are as long as they are, which a mask tells, instead of padded to the limit."""
        return any(name.endswith("mask") for name in self.prompt)


def case_of(family: FlowFamily, facts: BaseFacts, *, text_tokens: int | None = None) -> Case:
    """Return what is traced for a base, with a prompt of so many tokens where their number varies."""
    case = Case(
        key=json.dumps([facts.family, facts.max_tokens, text_tokens, dict(facts.architecture)]),
        family=family,
        facts=facts,
        prompt=family.prompt_shapes(facts.architecture, text_tokens=facts.max_tokens),
    )
    if text_tokens is None or not case.text_varies:
        return case
    shorter = min(text_tokens, facts.max_tokens)
    return replace(case, prompt=family.prompt_shapes(facts.architecture, text_tokens=shorter))


# ---- from the table


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _release(facts: BaseFacts) -> Mapping[str, Any] | None:
    """Return the traces of a base's architecture; keys left out of a configuration have diffusers' defaults."""
    family = _table().get(facts.family)
    if family is None:
        return None
    given = {**family["defaults"], **configuration(facts.architecture)}
    for release in family["releases"]:
        found: Mapping[str, Any] = release
        if given == {**family["defaults"], **found["config"]} and (
            facts.max_tokens == found["max_tokens"]
        ):
            return found
    return None


def configuration(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes the network: no private keys, sequences as JSON has them."""
    public = {key: value for key, value in architecture.items() if not key.startswith("_")}
    found: dict[str, Any] = json.loads(json.dumps(public))
    return found


def _tabled(release: Mapping[str, Any], workload: Workload) -> SampleCost:
    limit: int = release["max_tokens"]
    traces = release["costs"][str(workload.element_bytes)][workload.targets]
    step = traces["recomputed" if workload.checkpointing else "kept"]
    saved = bytes_at(step["saved_kib"], workload, max_tokens=limit)
    peak = bytes_at(step["peak_kib"], workload, max_tokens=limit)
    return SampleCost(
        saved_bytes=int(saved * KIB),
        adapter_saved_bytes=int(bytes_at(step["adapter_kib"], workload, max_tokens=limit) * KIB),
        temporary_bytes=int(max(0.0, peak - saved) * KIB),
        forward_bytes=int(bytes_at(traces["forward_kib"], workload, max_tokens=limit) * KIB),
        conditioning_bytes=0,
        forward_flops=int(flops_at(traces["forward_mflop"], workload, max_tokens=limit) * MEGA),
        step_flops=int(flops_at(step["step_mflop"], workload, max_tokens=limit) * MEGA),
        kernels=step["kernels"],
    )


# ---- traced


@lru_cache(maxsize=256)
def traced(case: Case, workload: Workload) -> SampleCost:
    """Run the network of a base without memory; `conditioning_bytes` is left out."""
    # What the network itself depends on; the rest is the size of its inputs.
    built = replace(workload, height_px=0, width_px=0, checkpointing=False, micro_batch=1)
    return _network(case, built).sample_cost(workload)


@lru_cache(maxsize=4)
def _network(case: Case, workload: Workload) -> TracedNetwork:
    from lora_trainer.model.trace import traced_network

    return traced_network(case.family, case.facts, workload, prompt=case.prompt)


@lru_cache(maxsize=16)
def built_shapes(case: Case, targets: Targets) -> Mapping[str, tuple[int, int]]:
    """Build the network without memory and read off what `adapter_shapes` gives."""
    import torch

    with torch.device("meta"):
        network = case.family.empty_denoiser(case.facts.architecture)
    shapes = {}
    for name in case.family.lora_targets(network, targets):
        weight: Any = network.get_submodule(name).weight
        shapes[name] = (math.prod(weight.shape[1:]), int(weight.shape[0]))
    return shapes
