"""What training on one sample costs: bytes, FLOPs and kernels by workload, and the shipped table of them. No torch.

The tables of the families (tables.json) have the traces of their public releases; `python -m scripts.make` makes
them. `base_costs.py` answers for any base: it reads them and traces every other architecture on `meta` (`trace.py`).

A release is traced at a few points and interpolated to any image size, rank, micro-batch and text length.
Saved bytes grow linearly with tokens and rank. A peak is the maximum of several linear sums and therefore
convex, so straight lines between traced points never fall below it. FLOPs are quadratic in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.config.declare import Checkpointing, Targets
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.tables import made_tables

KIB = 1024
MEGA = 10**6
RANKS = (4, 64)
REFERENCE_ROW = "elements_per_reference_px"
"""Key of what a pixel of a reference adds to the peak of a pass without gradients, in elements of the base's dtype."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How one sample is trained; `element_bytes` is the size of the base's dtype.

    `micro_batch` samples go through the network together; some tensors that are views for one sample are
    copies for several. `wide_adapter`: the adapter reads fp32 copies of its inputs, as every kind but
    plain LoRA does. `references_px` are (width, height) of the reference images of a sample.
    """

    height_px: int
    width_px: int
    element_bytes: int
    rank: int
    targets: Targets
    checkpointing: Checkpointing
    micro_batch: int = 1
    wide_adapter: bool = False
    references_px: tuple[tuple[int, int], ...] = ()

    @property
    def area_px(self) -> int:
        """Pixels of the image and its references: a network has as many tokens for each as for one of that size."""
        return self.height_px * self.width_px + sum(self.reference_areas_px)

    @property
    def reference_areas_px(self) -> tuple[int, ...]:
        """Pixels of each reference image."""
        return tuple(width_px * height_px for width_px, height_px in self.references_px)

    @property
    def unattended_px2(self) -> int:
        """Pairs of pixels that do not attend to each other where references attend to what is before them only."""
        own, behind, pairs = self.height_px * self.width_px, self.area_px, 0
        for area_px in self.reference_areas_px:
            behind -= area_px
            pairs += area_px * behind
        assert behind == own
        return pairs


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """Cost of training on one sample; multiply all fields but `kernels` by the micro-batch.

    `saved_bytes` are alive between forward and backward; `adapter_saved_bytes` of them are a wide
    adapter's fp32 copies and rank-sized intermediates. `temporary_bytes` is the step's peak minus
    `saved_bytes`. `host_bytes` wait for backward in pinned host memory. `forward_bytes` is the peak of a
    pass without gradients.
    """

    saved_bytes: int
    adapter_saved_bytes: int
    temporary_bytes: int
    forward_bytes: int
    forward_flops: int
    step_flops: int
    kernels: int
    host_bytes: int = 0


# ---- the table


def entry(element_bytes: int, *, wide: bool) -> str:
    """Return the table's key of a dtype's traces, with plain or wide adapters."""
    return f"{element_bytes} wide" if wide else str(element_bytes)


def release_of(facts: BaseFacts) -> Mapping[str, Any] | None:
    """Return the traces of a base's architecture, None where the table has none."""
    rows = made_tables(facts.family).get("costs")
    if rows is None:
        return None
    config = {**rows["defaults"], **facts.release.network_numbers()}
    if facts.references is not None and facts.references.as_channels:
        # A few thousand weights that are not trained: everything else is the network without references.
        config["in_channels"] = facts.latent_channels
    for release in rows["releases"]:
        release_traces: Mapping[str, Any] = release
        if config == {**rows["defaults"], **release_traces["config"]} and (
            facts.release.max_tokens == release_traces["max_tokens"]
        ):
            return release_traces
    return None


def tabled(
    release: Mapping[str, Any],
    workload: Workload,
    *,
    text_tokens: int,
    seen_px: int = 0,
    in_text: bool = False,
) -> SampleCost | None:
    """Return the cost by a release's traces; None if it was not traced like that.

    `seen_px` are the pixels of an image of as many tokens as text encoders see of the references. `in_text`: the
    references attend to what is before them only.
    """
    key = entry(workload.element_bytes, wide=workload.wide_adapter)
    traces = release["costs"].get(key, {}).get(workload.targets, {})
    if workload.checkpointing not in traces:
        return None
    step = traces[workload.checkpointing]
    if workload.checkpointing == "offloaded":  # work as "full" does, saved tensors elsewhere
        step = {**traces["full"], **step}
    areas = [side_px**2 for side_px in release["sides_px"]]
    usual, other = release["text_tokens"]
    own, area = workload.height_px * workload.width_px, workload.area_px + seen_px

    def at(values: Sequence[float], over_size: _OverSize, area: float = area) -> float:
        """Interpolate over size at the smallest rank, one sample and the usual text, then add each change.

        Rank, micro-batch and text length are treated as independent; each difference is linear in the area.
        """

        def change(first: int) -> float:
            ends = (values[first] - values[0], values[first + 1] - values[2])
            return _line(ends, areas, area)

        cost = over_size(values[:3], areas, area)
        cost += (workload.rank - RANKS[0]) / (RANKS[1] - RANKS[0]) * change(3)
        if workload.micro_batch > 1:  # per sample, two samples cost the same as more
            cost += change(5)
        if other and text_tokens != usual:
            cost += (text_tokens - usual) / (other - usual) * change(7)
        return cost

    def kib(values: Sequence[int]) -> int:
        return int(KIB * at(values, _polyline))

    def forward_bytes() -> int:
        """Return the peak of a pass without gradients, which has other tokens alive than training does."""
        added = release.get(REFERENCE_ROW)
        if added is None:
            return kib(traces["forward_kib"])
        references_px = workload.area_px - own
        alone = KIB * at(traces["forward_kib"], _polyline, own)
        return int(alone + added * workload.element_bytes * references_px)

    def mega(values: Sequence[int]) -> int:
        # What grows with the square of the size is attention.
        spared = _curvature(values[:3], areas) * workload.unattended_px2 if in_text else 0.0
        return int(MEGA * (at(values, _parabola) - spared))

    saved = kib(step["saved_kib"])
    return SampleCost(
        saved_bytes=saved,
        adapter_saved_bytes=kib(step["adapter_kib"]) if "adapter_kib" in step else 0,
        temporary_bytes=max(0, kib(step["peak_kib"]) - saved),
        forward_bytes=forward_bytes(),
        forward_flops=mega(traces["forward_mflop"]),
        step_flops=mega(step["step_mflop"]),
        kernels=step["kernels"],
        host_bytes=kib(step["host_kib"]) if "host_kib" in step else 0,
    )


_OverSize = Callable[[Sequence[float], Sequence[int], float], float]


def _line(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    share = (area - areas[0]) / (areas[-1] - areas[0])
    return values[0] + share * (values[1] - values[0])


def _polyline(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    piece = 0 if area < areas[1] else 1
    return _line(values[piece : piece + 2], areas[piece : piece + 2], area)


def _curvature(values: Sequence[float], areas: Sequence[int]) -> float:
    """Return the factor of the square in Lagrange's parabola through the values at the three sizes."""
    first, last = (
        (values[end] - values[end - 1]) / (areas[end] - areas[end - 1]) for end in (1, 2)
    )
    return (last - first) / (areas[2] - areas[0])


def _parabola(values: Sequence[float], areas: Sequence[int], area: float) -> float:
    """Evaluate Lagrange's parabola through the values at the three sizes."""
    total = 0.0
    for here, value in zip(areas, values, strict=True):
        for other in areas:
            if other != here:
                value *= (area - other) / (here - other)
        total += value
    return total
