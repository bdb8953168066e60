"""What a transformer costs at any size, from a few traced points that are kept in a table.

Interpolates a network's cost from a few traces to any image size, rank, micro-batch and text length.

Saved bytes grow linearly with tokens and rank. A peak is the maximum of several linear sums and therefore
convex, so straight lines between traced points never fall below it. FLOPs are quadratic in tokens. Inputs
are the values of one quantity at `POINTS`. Torch-free.

Costs of a flow-matching transformer: from a shipped table of traces, else traced when asked.

Inputs are a family, the facts of a base and a workload; outputs the planner's `SampleCost` and the
sizes of adapters. Architectures in the table need no torch; `scripts/write_cost_tables.py` writes the table.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.config import CHECKPOINTING, Checkpointing
from lora_trainer.costs.sample_cost import TARGET_GROUPS, SampleCost, Targets, Workload
from lora_trainer.families.base import BaseFacts, Family

if TYPE_CHECKING:
    from lora_trainer.tracing.trace import TracedNetwork

SIDES_PX = (512, 768, 1024)
RANKS = (4, 64)
SHORT_TEXT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Point:
    """One traced workload: a square image at the smallest rank, one sample, text at the limit by default."""

    side_px: int
    rank: int = RANKS[0]
    micro_batch: int = 1
    short_text: bool = False

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
            text_tokens=SHORT_TEXT_TOKENS if self.short_text else None,
            wide_adapter=wide,
        )


_ENDS = (SIDES_PX[0], SIDES_PX[-1])
POINTS = (
    *(Point(side_px=side) for side in SIDES_PX),
    *(Point(side_px=side, rank=RANKS[1]) for side in _ENDS),
    *(Point(side_px=side, micro_batch=2) for side in _ENDS),
    *(Point(side_px=side, short_text=True) for side in _ENDS),
)
"""The last two are traced only for families whose text length varies."""
_AREAS = tuple(side**2 for side in SIDES_PX)
Curve = Callable[[Sequence[float], float], float]


def bytes_at(values: Sequence[float], workload: Workload, *, max_tokens: int) -> float:
    """Interpolate a peak or the saved bytes of one sample."""
    return _at(values, workload, max_tokens=max_tokens, over_size=_polyline)


def flops_at(values: Sequence[float], workload: Workload, *, max_tokens: int) -> float:
    """Interpolate the FLOPs of one sample."""
    return _at(values, workload, max_tokens=max_tokens, over_size=_parabola)


def _at(values: Sequence[float], workload: Workload, *, max_tokens: int, over_size: Curve) -> float:
    """Interpolate over size at the smallest rank, one sample and the longest text, then add each change.

    Rank, micro-batch and text length are treated as independent; each difference is linear in the area.
    """
    area = workload.height_px * workload.width_px
    sizes, least, most = values[:3], values[0], values[2]

    def change(first: int) -> float:
        return _line((values[first] - least, values[first + 1] - most), area)

    cost = over_size(sizes, area)
    cost += (workload.rank - RANKS[0]) / (RANKS[1] - RANKS[0]) * change(3)
    if workload.micro_batch > 1:  # per sample, two samples cost the same as more
        cost += change(5)
    if len(values) > 7 and workload.text_tokens is not None:
        missing = max_tokens - min(workload.text_tokens, max_tokens)
        cost += missing / (max_tokens - SHORT_TEXT_TOKENS) * change(7)
    return cost


def _line(values: Sequence[float], area: float) -> float:
    share = (area - _AREAS[0]) / (_AREAS[-1] - _AREAS[0])
    return values[0] + share * (values[1] - values[0])


def _polyline(values: Sequence[float], area: float) -> float:
    piece = 0 if area < _AREAS[1] else 1
    start, end = _AREAS[piece], _AREAS[piece + 1]
    share = (area - start) / (end - start)
    return values[piece] + share * (values[piece + 1] - values[piece])


def _parabola(values: Sequence[float], area: float) -> float:
    """Evaluate Lagrange's parabola through the values at the three sizes."""
    total = 0.0
    for here, value in zip(_AREAS, values, strict=True):
        for other in _AREAS:
            if other != here:
                value *= (area - other) / (here - other)
        total += value
    return total


FILE = Path(__file__).with_name("cost_tables.json")
KIB = 1024
MEGA = 10**6
TARGETS: tuple[Targets, ...] = tuple(TARGET_GROUPS)
"""From the fewest modules to the most; each includes the modules of the previous."""


class TabledFamily(Family):
    """A family whose public releases have costs in the table; other architectures are traced."""

    text_multiple: int = 1
    """The network pads texts to a multiple of this many tokens."""

    @abstractmethod
    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each conditioning tensor of a text of `text_tokens` tokens, batch 1.

        `text_tokens` counts like `max_tokens`. Names that end in `mask` are int64, all others float.
        """

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        """Return the cost from the table; an unknown architecture is traced, once per workload."""
        case = case_of(self, facts, text_tokens=workload.text_tokens)
        release = _release(facts)
        if release is not None and _covers(release, workload):
            cost = _tabled(release, self._padded(workload))
        else:
            cost = traced(case, workload)
        return replace(cost, conditioning_bytes=case.conditioning_bytes)

    def known_checkpointing(
        self, facts: BaseFacts, *, element_bytes: int, targets: Targets, wide_adapter: bool
    ) -> tuple[Checkpointing, ...]:
        """Return the levels in the table; all levels for an architecture that is traced anyway."""
        release = _release(facts)
        if release is None:
            return CHECKPOINTING
        traces = release["costs"].get(entry(element_bytes, wide=wide_adapter), {}).get(targets, {})
        return tuple(kind for kind in CHECKPOINTING if kind in traces) or CHECKPOINTING

    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, int]]:
        release = _release(facts)
        if release is None:
            return built_shapes(case_of(self, facts), targets)
        included = TARGETS[: TARGETS.index(targets) + 1]
        return {
            f"{prefix}{index}.{name}": (fan_in, out)
            for prefix, first, count, modules in release["modules"]
            for index in range(first, first + count)
            for name, (fan_in, out, least) in modules.items()
            if least in included
        }

    def _padded(self, workload: Workload) -> Workload:
        if workload.text_tokens is None:
            return workload
        pieces = math.ceil(workload.text_tokens / self.text_multiple)
        return replace(workload, text_tokens=pieces * self.text_multiple)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parts of a base that decide its costs, compared by `key`, and the shapes of one encoded prompt."""

    key: str
    family: TabledFamily = field(compare=False)
    facts: BaseFacts = field(compare=False)
    prompt: Mapping[str, tuple[int, ...]] = field(compare=False)

    @property
    def conditioning_bytes(self) -> int:
        """Bytes of one encoded prompt as it is cached: float32, masks int64."""
        sizes = {name: math.prod(shape) for name, shape in self.prompt.items()}
        return sum(size * (8 if name.endswith("mask") else 4) for name, size in sizes.items())

    @property
    def text_varies(self) -> bool:
        """Whether texts keep their own length (then there is a mask) instead of being padded to the limit."""
        return any(name.endswith("mask") for name in self.prompt)


def case_of(family: TabledFamily, facts: BaseFacts, *, text_tokens: int | None = None) -> Case:
    """Return the case to trace for a base; `text_tokens` counts where the family's text length varies."""
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


def entry(element_bytes: int, *, wide: bool) -> str:
    """Return the table's key of a dtype's traces, with plain or wide adapters."""
    return f"{element_bytes} wide" if wide else str(element_bytes)


def _entry(workload: Workload) -> str:
    return entry(workload.element_bytes, wide=workload.wide_adapter)


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def _release(facts: BaseFacts) -> Mapping[str, Any] | None:
    """Return the traces of a base's architecture, None where the table has none.

    Keys left out of a configuration have diffusers' defaults.
    """
    family = _table().get(facts.family)
    if family is None:
        return None
    config = {**family["defaults"], **configuration(facts.architecture)}
    for release in family["releases"]:
        release_traces: Mapping[str, Any] = release
        if config == {**family["defaults"], **release_traces["config"]} and (
            facts.max_tokens == release_traces["max_tokens"]
        ):
            return release_traces
    return None


def configuration(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return an architecture without private keys, with sequences as JSON lists, for comparison."""
    public = {key: value for key, value in architecture.items() if not key.startswith("_")}
    plain: dict[str, Any] = json.loads(json.dumps(public))
    return plain


def _covers(release: Mapping[str, Any], workload: Workload) -> bool:
    return workload.checkpointing in release["costs"].get(_entry(workload), {}).get(
        workload.targets, {}
    )


def _tabled(release: Mapping[str, Any], workload: Workload) -> SampleCost:
    traces = release["costs"][_entry(workload)][workload.targets]
    step = traces[workload.checkpointing]
    if (
        workload.checkpointing == "offloaded"
    ):  # same FLOPs and kernels as "full", saved tensors elsewhere
        step = {**traces["full"], **step}

    def kib(values: Sequence[int]) -> int:
        return int(KIB * bytes_at(values, workload, max_tokens=release["max_tokens"]))

    def mega(values: Sequence[int]) -> int:
        return int(MEGA * flops_at(values, workload, max_tokens=release["max_tokens"]))

    saved = kib(step["saved_kib"])
    return SampleCost(
        saved_bytes=saved,
        adapter_saved_bytes=kib(step["adapter_kib"]) if "adapter_kib" in step else 0,
        temporary_bytes=max(0, kib(step["peak_kib"]) - saved),
        forward_bytes=kib(traces["forward_kib"]),
        conditioning_bytes=0,
        forward_flops=mega(traces["forward_mflop"]),
        step_flops=mega(step["step_mflop"]),
        kernels=step["kernels"],
        host_bytes=kib(step["host_kib"]) if "host_kib" in step else 0,
    )


# ---- traced


@lru_cache(maxsize=256)
def traced(case: Case, workload: Workload) -> SampleCost:
    """Trace a base's network on the meta device; `conditioning_bytes` stays 0."""
    # Cache key: only the fields that change the network; the others are sizes of its inputs.
    built = replace(workload, height_px=0, width_px=0, checkpointing="none", micro_batch=1)
    return _network(case, built).sample_cost(workload)


@lru_cache(maxsize=4)
def _network(case: Case, workload: Workload) -> TracedNetwork:
    from lora_trainer.tracing.trace import traced_network

    return traced_network(case.family, case.facts, workload, prompt=case.prompt)


@lru_cache(maxsize=16)
def built_shapes(case: Case, targets: Targets) -> Mapping[str, tuple[int, int]]:
    """Build the network on the meta device and return its `adapter_shapes`."""
    import torch

    with torch.device("meta"):
        network = case.family.empty_denoiser(case.facts.architecture)
    shapes = {}
    for name in case.family.lora_targets(network, targets):
        weight: Any = network.get_submodule(name).weight
        shapes[name] = (math.prod(weight.shape[1:]), int(weight.shape[0]))
    return shapes
