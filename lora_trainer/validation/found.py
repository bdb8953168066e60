"""What has been measured of an adapter so far, and how weights become parts.

Input: figures; output: parts, reasons for those left out, and the Validation they make in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lora_trainer.validation.parts import rank_part, weights_part
from lora_trainer.validation.result import Validation
from lora_trainer.validation.weights import WeightFigures


@dataclass(kw_only=True)
class Found:
    """Parts in [0, 1], reasons by part that is left out, figures and remarks."""

    parts: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def result(self, file: str) -> Validation:
        """Return it as the validation of a file of that name."""
        return Validation(
            file=file,
            parts=self.parts,
            left_out=self.left_out,
            figures=self.figures,
            notes=self.notes,
        )


def measure_weights(weights: WeightFigures, found: Found) -> None:
    """Add the parts that follow from the tensors alone."""
    norms = list(weights.relative_norms.values())
    found.parts["weights"] = weights_part(norms)
    found.figures |= {
        "modules": len(norms),
        "relative_norm": spread(norms) if weights.finite else None,
        "dead": weights.dead,
        "exploded": weights.exploded,
    }
    if weights.ranks_used:
        used = list(weights.ranks_used.values())
        found.parts["rank"] = rank_part(used)
        found.figures["rank_used"] = spread(used)
    elif weights.finite:
        found.left_out["rank"] = weights.why_not


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the mean and the most."""
    return {"least": min(values), "mean": fmean(values), "most": max(values)}
