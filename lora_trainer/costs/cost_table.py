"""The cost of training on one sample, for any base: from a shipped table of traces, else traced when asked.

Inputs are a family, the facts of a base and a workload; outputs the planner's `SampleCost` and the sizes
of adapters. The public releases are in the table and need no torch (`scripts/write_cost_tables.py` writes
it). Any other architecture is run on `meta`, once per workload.

A release is traced at a few points and interpolated to any image size, rank, micro-batch and text length.
Saved bytes grow linearly with tokens and rank. A peak is the maximum of several linear sums and therefore
convex, so straight lines between traced points never fall below it. FLOPs are quadratic in tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import user_cache_folder
from lora_trainer.common.memo import MemoTable
from lora_trainer.config.declare import CHECKPOINTING, TARGETS, Checkpointing, Targets
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base import BaseFacts, Family

if TYPE_CHECKING:
    from lora_trainer.costs.trace import TracedNetwork

FILE = Path(__file__).with_name("cost_tables.json")
KIB = 1024
MEGA = 10**6
RANKS = (4, 64)


# ---- the points


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where a release was traced: three sides of square images, and two lengths of its text.

    The first length is that of a release read without chunks; the second lies below it where texts keep
    their own length, above it where a network reads several chunks, and is 0 where all texts are as long.
    """

    sides_px: tuple[int, int, int]
    text_tokens: tuple[int, int]

    @property
    def areas(self) -> tuple[int, int, int]:
        small, middle, large = self.sides_px
        return small**2, middle**2, large**2


def _at(
    values: Sequence[float],
    workload: Workload,
    grid: Grid,
    text_tokens: int,
    *,
    over_size: Callable[[Sequence[float], Sequence[int], float], float],
) -> float:
    """Interpolate over size at the smallest rank, one sample and the usual text, then add each change.

    Rank, micro-batch and text length are treated as independent; each difference is linear in the area.
    """
    area = workload.height_px * workload.width_px
    sizes, least, most = values[:3], values[0], values[2]

    def change(first: int) -> float:
        return _line((values[first] - least, values[first + 1] - most), grid.areas, area)

    cost = over_size(sizes, grid.areas, area)
    cost += (workload.rank - RANKS[0]) / (RANKS[1] - RANKS[0]) * change(3)
    if workload.micro_batch > 1:  # per sample, two samples cost the same as more
        cost += change(5)
    usual, other = grid.text_tokens
    if other and text_tokens != usual:
        cost += (text_tokens - usual) / (other - usual) * change(7)
    return cost


def _line(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    share = (area - areas[0]) / (areas[-1] - areas[0])
    return values[0] + share * (values[1] - values[0])


def _polyline(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    piece = 0 if area < areas[1] else 1
    return _line(values[piece : piece + 2], areas[piece : piece + 2], area)


def _parabola(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    """Evaluate Lagrange's parabola through the values at the three sizes."""
    total = 0.0
    for here, value in zip(areas, values, strict=True):
        for other in areas:
            if other != here:
                value *= (area - other) / (here - other)
        total += value
    return total


# ---- the answers


def sample_cost(family: Family, facts: BaseFacts, workload: Workload) -> SampleCost:
    """Return the cost from the table; an unknown architecture is traced, once per workload."""
    release = _release(facts)
    if release is None or not _covers(release, workload):
        return traced_cost(family, facts, workload)
    tokens = _text_tokens(family, facts, workload)
    padded = math.ceil(tokens / family.text.multiple) * family.text.multiple
    cost = _tabled(release, workload, text_tokens=min(padded, facts.text_tokens))
    case = case_of(family, facts, text_tokens=tokens)
    return replace(cost, conditioning_bytes=case.conditioning_bytes)


def traced_cost(family: Family, facts: BaseFacts, workload: Workload) -> SampleCost:
    """Return the cost of a network of any architecture, run on `meta`."""
    case = case_of(family, facts, text_tokens=_text_tokens(family, facts, workload))
    return replace(traced(case, workload), conditioning_bytes=case.conditioning_bytes)


def known_checkpointing(
    family: Family,
    facts: BaseFacts,
    *,
    element_bytes: int,
    targets: Targets,
    wide_adapter: bool,
) -> tuple[Checkpointing, ...]:
    """Return the levels in the table; all levels for an architecture that is traced anyway."""
    release = _release(facts)
    if release is None:
        return CHECKPOINTING
    traces = release["costs"].get(entry(element_bytes, wide=wide_adapter), {}).get(targets, {})
    return tuple(kind for kind in CHECKPOINTING if kind in traces) or CHECKPOINTING


def adapter_shapes(
    family: Family, facts: BaseFacts, *, targets: Targets
) -> Mapping[str, tuple[int, ...]]:
    """Return (fan_in, out) of each denoiser module that gets an adapter, in module order.

    `fan_in` is input channels times kernel elements; a kernel of several elements adds its size as a
    third number.
    """
    # For an adapter a convolution of one element is a linear layer.
    return {
        name: shape[:2] if shape[-1] == 1 else shape
        for name, shape in _layer_shapes(family, facts, targets).items()
    }


def linear_shapes(family: Family, facts: BaseFacts) -> Mapping[str, tuple[int, int]]:
    """Return (fan_in, out) of the linear layers that quantisation takes, in module order."""
    skipped = set(family.traits.quantization_skip)
    return {
        name: (shape[0], shape[1])
        for name, shape in _layer_shapes(family, facts, "all").items()
        if len(shape) == 2 and skipped.isdisjoint(name.split("."))
    }


def _layer_shapes(
    family: Family, facts: BaseFacts, targets: Targets
) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each adapted layer; a convolution's has the elements of its kernel last."""
    release = _release(facts)
    if release is None:
        return built_shapes(case_of(family, facts), targets)
    included = TARGETS[: TARGETS.index(targets) + 1]
    return {
        f"{prefix}{index}.{name}": tuple(shape)
        for prefix, first, count, modules in release["modules"]
        for index in range(first, first + count)
        for name, (*shape, least) in modules.items()
        if least in included
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parts of a base that decide its costs, compared by `key`, and the shapes of one encoded prompt."""

    key: str
    family: Family = field(compare=False)
    facts: BaseFacts = field(compare=False)
    prompt: Mapping[str, tuple[int, ...]] = field(compare=False)

    @property
    def conditioning_bytes(self) -> int:
        """Bytes of one encoded prompt as it is cached: float32, masks int64."""
        sizes = {name: math.prod(shape) for name, shape in self.prompt.items()}
        return sum(size * (8 if name.endswith("mask") else 4) for name, size in sizes.items())


def case_of(family: Family, facts: BaseFacts, *, text_tokens: int | None = None) -> Case:
    """Return the case to trace for a base whose prompt has `text_tokens` tokens; None: as long as it can be."""
    tokens = text_tokens or facts.text_tokens
    return Case(
        key=json.dumps([facts.family, facts.max_tokens, tokens, dict(facts.architecture)]),
        family=family,
        facts=facts,
        prompt=family.prompt_shapes(facts.architecture, text_tokens=tokens),
    )


def texts_vary(family: Family, facts: BaseFacts) -> bool:
    """Return whether texts keep their own length, with a mask, instead of being padded to one length."""
    shapes = family.prompt_shapes(facts.architecture, text_tokens=facts.max_tokens)
    return any(name.endswith("mask") for name in shapes)


def _text_tokens(family: Family, facts: BaseFacts, workload: Workload) -> int:
    """Return the length of the longest prompt as the text encoder gives it."""
    if not texts_vary(family, facts) or workload.text_tokens is None:
        return facts.text_tokens
    return min(workload.text_tokens, facts.text_tokens)


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
    """Return the traces of a base's architecture, None where the table has none."""
    rows = _table().get(facts.family)
    if rows is None:
        return None
    config = {**rows["defaults"], **configuration(facts)}
    for release in rows["releases"]:
        release_traces: Mapping[str, Any] = release
        if config == {**rows["defaults"], **release_traces["config"]} and (
            facts.max_tokens == release_traces["max_tokens"]
        ):
            return release_traces
    return None


def configuration(facts: BaseFacts) -> dict[str, Any]:
    """Return a base's `network_numbers` with sequences as JSON lists, for comparison."""
    plain: dict[str, Any] = json.loads(json.dumps(facts.network_numbers()))
    return plain


def _covers(release: Mapping[str, Any], workload: Workload) -> bool:
    return workload.checkpointing in release["costs"].get(_entry(workload), {}).get(
        workload.targets, {}
    )


def _tabled(release: Mapping[str, Any], workload: Workload, *, text_tokens: int) -> SampleCost:
    traces = release["costs"][_entry(workload)][workload.targets]
    grid = Grid(sides_px=tuple(release["sides_px"]), text_tokens=tuple(release["text_tokens"]))
    step = traces[workload.checkpointing]
    if (
        workload.checkpointing == "offloaded"
    ):  # same FLOPs and kernels as "full", saved tensors elsewhere
        step = {**traces["full"], **step}

    def kib(values: Sequence[int]) -> int:
        return int(KIB * _at(values, workload, grid, text_tokens, over_size=_polyline))

    def mega(values: Sequence[int]) -> int:
        return int(MEGA * _at(values, workload, grid, text_tokens, over_size=_parabola))

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
    """Trace a base's network on the meta device, once on this machine; `conditioning_bytes` stays 0."""
    key = f"{case.key} {json.dumps(asdict(workload))}"
    remembered = _memo().get(key)
    if remembered is not None:
        return SampleCost(**json.loads(remembered))
    # Cache key: only the fields that change the network; the others are sizes of its inputs.
    built = replace(workload, height_px=0, width_px=0, checkpointing="none", micro_batch=1)
    cost = _network(case, built).sample_cost(workload)
    _remember(key, asdict(cost))
    return cost


@lru_cache(maxsize=1)
def _memo() -> MemoTable:
    """Return the traces of earlier processes: a trace takes a second, and importing torch three more.

    It is in the folder of the user, as the sizes of a network do not depend on a run's settings.
    """
    return MemoTable.load(user_cache_folder(), "traces", version=_code_version())


def _code_version() -> str:
    """Return a digest of the code that a trace depends on: ours, and the versions of the libraries."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in ("costs", "families", "lora", "network"):
        for file in sorted((package / room).rglob("*.py")):
            digest.update(file.read_bytes())
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers", "peft")}
    return f"{digest.hexdigest()[:16]} {libraries}"


def _remember(key: str, value: Mapping[str, Any]) -> None:
    _memo().put(key, json.dumps(value))
    with suppress(MachineError):  # `plan` only reads; it works where nothing can be written
        _memo().save()


@lru_cache(maxsize=4)
def _network(case: Case, workload: Workload) -> TracedNetwork:
    from lora_trainer.costs.trace import traced_network

    return traced_network(case.family, case.facts, workload, prompt=case.prompt)


@lru_cache(maxsize=16)
def built_shapes(case: Case, targets: Targets) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each adapted layer of a network, as in the table; it is built on the meta device."""
    key = f"{case.key} {targets}"
    remembered = _memo().get(key)
    if remembered is not None:
        return {name: tuple(shape) for name, shape in json.loads(remembered).items()}
    import torch

    with torch.device("meta"):
        network = case.family.empty_denoiser(case.facts.architecture)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in case.family.lora_targets(network, targets):
        weight: Any = network.get_submodule(name).weight
        out, _, *kernel = weight.shape
        shape = (math.prod(weight.shape[1:]), int(out))
        shapes[name] = (*shape, math.prod(kernel)) if kernel else shape
    _remember(key, shapes)
    return shapes
