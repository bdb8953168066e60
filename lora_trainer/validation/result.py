"""What a validation says: the parts there are, the parts there are not and why, and the score.

Input: parts as measured; output: the same as plain values, for validation.json, `--json` and the
report. A score is of the parts there are; `complete` says whether that is all of them. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_trainer.validation.parts import WEIGHTS, score

VALIDATION_FILE = "validation.json"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One adapter file's validation: parts in [0, 1], `left_out` reasons by part, measured figures, remarks."""

    file: str
    parts: Mapping[str, float]
    left_out: Mapping[str, str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def score(self) -> float | None:
        """The weighted geometric mean of the parts there are; None where none could be measured."""
        return score(self.parts) if self.parts else None

    @property
    def complete(self) -> bool:
        """Whether every part was measured."""
        return self.parts.keys() == WEIGHTS.keys()

    @property
    def weight_left_out(self) -> float:
        """The share of the score that the parts that are not there would have."""
        return sum(weight for name, weight in WEIGHTS.items() if name not in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, parts in the order of their weight."""
        found = self.score
        return {
            "file": self.file,
            "score": None if found is None else round(found, 4),
            "complete": self.complete,
            "parts": {name: round(self.parts[name], 4) for name in WEIGHTS if name in self.parts},
            "left_out": {name: self.left_out[name] for name in WEIGHTS if name in self.left_out},
            "weight_left_out": round(self.weight_left_out, 4),
            "figures": _plain(self.figures),
            "notes": list(self.notes),
        }


def _plain(value: Any) -> Any:
    """Return JSON values; a figure that is not finite, as of a broken adapter, becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
