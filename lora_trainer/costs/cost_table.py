"""The shipped table of traces: what training on one sample of a public release costs. No torch.

Inputs are the facts of a base and a workload; output is the planner's `SampleCost`. `base_costs.py` reads the
table and traces every other architecture; `scripts/write_cost_tables.py` writes it.

A release is traced at a few points and interpolated to any image size, rank, micro-batch and text length.
Saved bytes grow linearly with tokens and rank. A peak is the maximum of several linear sums and therefore
convex, so straight lines between traced points never fall below it. FLOPs are quadratic in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base import BaseFacts

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


def entry(element_bytes: int, *, wide: bool) -> str:
    """Return the table's key of a dtype's traces, with plain or wide adapters."""
    return f"{element_bytes} wide" if wide else str(element_bytes)


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def release_of(facts: BaseFacts) -> Mapping[str, Any] | None:
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


def tabled(
    release: Mapping[str, Any], workload: Workload, *, text_tokens: int
) -> SampleCost | None:
    """Return the cost by a release's traces, without `conditioning_bytes`; None if it was not traced like that."""
    key = entry(workload.element_bytes, wide=workload.wide_adapter)
    traces = release["costs"].get(key, {}).get(workload.targets, {})
    if workload.checkpointing not in traces:
        return None
    grid = Grid(sides_px=tuple(release["sides_px"]), text_tokens=tuple(release["text_tokens"]))
    step = traces[workload.checkpointing]
    if workload.checkpointing == "offloaded":  # work as "full" does, saved tensors elsewhere
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
