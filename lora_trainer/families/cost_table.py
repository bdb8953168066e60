"""What a flow-matching transformer costs: from a shipped table of traces, else traced on the spot.

Inputs are a family, the facts of a base and a workload; outputs the planner's `SampleCost` and the
sizes of adapters. Known architectures need no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base import BaseFacts
from lora_trainer.families.costs import SampleCost, Targets, Workload

if TYPE_CHECKING:
    from lora_trainer.families.flow import FlowFamily


def sample_cost(family: FlowFamily, facts: BaseFacts, workload: Workload) -> SampleCost:
    """Return memory and FLOPs of one sample; an unknown architecture is traced, once per workload."""
    prompt = family.prompt_shapes(facts.architecture, text_tokens=facts.max_tokens)
    cost = _traced(_Case(family=family, facts=facts, key=_key(facts)), workload)
    text_bytes = sum(
        math.prod(shape) * (8 if name.endswith("mask") else 4) for name, shape in prompt.items()
    )
    return replace(cost, conditioning_bytes=text_bytes)


def adapter_shapes(
    family: FlowFamily, facts: BaseFacts, *, targets: Targets
) -> Mapping[str, tuple[int, int]]:
    """Return (fan_in, out) of each module that gets an adapter, in module order."""
    return _built_shapes(_Case(family=family, facts=facts, key=_key(facts)), targets)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A base as far as its costs go; only `key` is compared."""

    key: str
    family: FlowFamily = field(compare=False)
    facts: BaseFacts = field(compare=False)


def _key(facts: BaseFacts) -> str:
    return json.dumps([facts.family, facts.max_tokens, dict(facts.architecture)], sort_keys=True)


@lru_cache(maxsize=256)
def _traced(case: _Case, workload: Workload) -> SampleCost:
    from lora_trainer.model.trace import traced_network

    prompt = case.family.prompt_shapes(
        case.facts.architecture, text_tokens=case.facts.max_tokens
    )
    network = traced_network(case.family, case.facts, workload, prompt=prompt)
    return network.sample_cost(workload)


@lru_cache(maxsize=64)
def _built_shapes(case: _Case, targets: Targets) -> Mapping[str, tuple[int, int]]:
    import torch

    with torch.device("meta"):
        network = case.family.empty_denoiser(case.facts.architecture)
    shapes = {}
    for name in case.family.lora_targets(network, targets):
        weight: Any = network.get_submodule(name).weight
        shapes[name] = (math.prod(weight.shape[1:]), int(weight.shape[0]))
    return shapes
