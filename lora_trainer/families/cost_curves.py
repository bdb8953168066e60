"""Interpolates a network's cost from a few traces to any image size, rank, micro-batch and text length.

Saved bytes grow linearly with tokens and rank. A peak is the maximum of several linear sums and therefore
convex, so straight lines between traced points never fall below it. FLOPs are quadratic in tokens. Inputs
are the values of one quantity at `POINTS`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_trainer.config import Checkpointing
from lora_trainer.families.costs import Targets, Workload

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
