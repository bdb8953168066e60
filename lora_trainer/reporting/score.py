"""The score of a LoRA: its parts as formulas, and the result that names the missing parts.

Inputs are measured losses, norms and distances. Each part is a pure function of them, in [0, 1]; the score is the
weighted geometric mean of the measured parts, so that one broken part sinks it. Output: plain values for
validation.json, `--json` and the report. Torch-free. docs/scores.md explains each part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from lora_trainer.common.records import as_json

# Weight of each part in the score; the weights add up to 1.
WEIGHTS: Mapping[str, float] = {
    "gain": 0.25,
    "weights": 0.15,
    "similarity": 0.15,
    "strength": 0.12,
    "generalisation": 0.12,
    "drift": 0.1,
    "memorisation": 0.08,
    "rank": 0.03,
}
# A part of zero counts as this in the geometric mean: it sinks the score, but other parts still matter.
FLOOR = 0.05
GAIN_HALF = 0.05
DEAD_BELOW, SANE_UP_TO = 1e-5, 0.5
RANK_FULL = 0.25
COPIED, OWN = 0.5, 0.9


def score(parts: Mapping[str, float]) -> float:
    """Return exp(sum w ln max(p, 0.05) / sum w) over one or more measured parts; 0 if the weights are unusable."""
    if parts.get("weights") == 0:
        return 0.0
    total = math.fsum(WEIGHTS[name] for name in parts)
    logs = math.fsum(WEIGHTS[name] * math.log(max(part, FLOOR)) for name, part in parts.items())
    return math.exp(logs / total)


def weights_part(relative_norms: Sequence[float]) -> float:
    """Return the mean over modules of 1 where 1e-5 <= r <= 0.5, 0 below, 0.5 / r above, 0 if not finite.

    r is |update| / |weight|, both Frobenius norms; an adapter with any NaN or infinity gets 0.
    """
    if not relative_norms or not all(map(math.isfinite, relative_norms)):
        return 0.0
    return fmean(0.0 if r < DEAD_BELOW else min(1.0, SANE_UP_TO / r) for r in relative_norms)


def rank_part(used: Sequence[float]) -> float:
    """Return the mean over modules of min(1, used / 0.25); `used` is effective rank / rank."""
    return fmean(min(1.0, share / RANK_FULL) for share in used)


def effective_rank(singular_values: Sequence[float]) -> float:
    """Return exp of the entropy of p = s^2 / sum s^2, at least 1; 0 for an update of zero.

    After Roy and Vetterli 2007 ("The effective rank"), with energies in place of values.
    """
    energy = math.fsum(value * value for value in singular_values)
    if energy == 0:
        return 0.0
    shares = [value * value / energy for value in singular_values]
    return math.exp(-math.fsum(share * math.log(share) for share in shares if share > 0))


def mean_gain(base: Sequence[float], adapted: Sequence[float]) -> float:
    """Return the mean over timesteps of 1 - adapted / base, clipped at -1; both losses have the same noise."""
    pairs = zip(base, adapted, strict=True)
    return fmean(max(-1.0, relative_gain(before, after)) for before, after in pairs)


def relative_gain(before: float, after: float) -> float:
    """Return 1 - after / before; -1 where that is not a number. Where the base has no loss there is nothing to gain."""
    if before == 0:
        return 0.0 if after == 0 else -1.0
    share = 1 - after / before
    return share if math.isfinite(share) else -1.0


def gain_part(gain: float) -> float:
    """Return g / (g + 0.05), 0 without a gain; a loss 5 % below the base's gives 0.5."""
    return gain / (gain + GAIN_HALF) if gain > 0 else 0.0


def strength_part(losses: Mapping[float, float]) -> float:
    """Return (L(0) - L(1)) / (L(0) - min L), the share of the best gain that strength 1 reaches.

    `losses` are held-out losses by strength, which must include 0 and 1; 0 where no strength helps.
    """
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    best = losses[0.0] - min(finite)
    if best <= 0 or not math.isfinite(losses[1.0]):
        return 0.0
    return _clipped((losses[0.0] - losses[1.0]) / best)


def generalisation_part(*, trained_gain: float, held_out_gain: float) -> float:
    """Return held-out gain / gain on trained images, in [0, 1]; 0 where nothing was learned."""
    return _clipped(held_out_gain / trained_gain) if trained_gain > 0 else 0.0


def similarity_part(*, base_distance: float, adapted_distance: float) -> float:
    """Return 1 - E(adapted) / E(base), where E is the energy distance of samples to the dataset's images."""
    return _clipped(1 - max(0.0, adapted_distance) / base_distance)


def memorisation_part(*, base_ratio: float, adapted_ratio: float) -> float:
    """Return (q - 0.5) / 0.4 in [0, 1], q = ratio of the adapter's samples / ratio of the base's.

    A ratio is the distance to the nearest trained image over the distance to the nearest held-out image.
    """
    return _clipped((adapted_ratio / base_ratio - COPIED) / (OWN - COPIED))


def drift_part(*, change: float, base_loss: float) -> float:
    """Return 1 / (1 + change / loss).

    `change` is the mean squared change of predictions on unrelated prompts, `base_loss` the base's mean
    squared error there.
    """
    if base_loss == 0:
        return 1.0 if change == 0 else 0.0
    ratio = change / base_loss
    return 1 / (1 + ratio) if math.isfinite(ratio) else 0.0


def expected_nearest(distances: Sequence[float], *, count: int) -> float:
    """Return the expected minimum of `count` distances drawn without replacement.

    The nearest of many images is nearer than the nearest of few, so sets of unequal size are compared at
    the size of the smaller one.
    """
    ordered = sorted(distances)
    whole = math.comb(len(ordered), count)
    return math.fsum(
        distance * math.comb(len(ordered) - index - 1, count - 1) / whole
        for index, distance in enumerate(ordered)
    )


def energy_distance(
    between: Sequence[float], within_first: Sequence[float], within_second: Sequence[float]
) -> float:
    """Return 2 mean(between) - mean(within first) - mean(within second), over pairs of distinct vectors.

    Szekely and Rizzo 2013 ("Energy statistics"). Without the pairs of a vector with itself the estimate has
    no bias, so it may be slightly below 0.
    """
    return 2 * fmean(between) - fmean(within_first) - fmean(within_second)


def _clipped(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


VALIDATION_FILE = "validation.json"


@dataclass(frozen=True, kw_only=True)
class ScoreRecord:
    """validation.json and `validate --json`: the score of a LoRA file; its fields in the order of the file."""

    file: str
    score: float
    """0 to 1, of the measured parts; NaN without any."""
    complete: bool
    """Whether every part was measured."""
    parts: Mapping[str, float]
    """The measured parts, each 0 to 1, in the order of their weight."""
    left_out: Mapping[str, str]
    """Reasons by part that was left out."""
    weight_left_out: float
    """Weight of the missing parts, 0 to 1."""
    figures: Mapping[str, Any]
    """Measured figures."""
    notes: Sequence[str]
    """Remarks."""


@dataclass(kw_only=True)
class Validation:
    """One adapter file's validation. Parts are added as they are measured."""

    file: str
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the score, in [0, 1]."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons by part that was left out."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Measured figures."""
    notes: list[str] = field(default_factory=list)
    """Remarks."""

    def leave_out(self, why: str, *parts: str) -> None:
        self.left_out |= dict.fromkeys(parts, why)

    @property
    def score(self) -> float | None:
        """Weighted geometric mean of the measured parts; None without any part."""
        return score(self.parts) if self.parts else None

    @property
    def complete(self) -> bool:
        """Whether every part was measured."""
        return self.parts.keys() == WEIGHTS.keys()

    @property
    def weight_left_out(self) -> float:
        """Weight of the missing parts, 0 to 1."""
        return sum(weight for name, weight in WEIGHTS.items() if name not in self.parts)

    @property
    def rounded_parts(self) -> dict[str, float]:
        """The measured parts with four decimals, in the order of their weight."""
        return {name: round(self.parts[name], 4) for name in WEIGHTS if name in self.parts}

    def to_json(self) -> dict[str, Any]:
        """Return plain values, parts in the order of their weight."""
        score = self.score
        record = ScoreRecord(
            file=self.file,
            score=math.nan if score is None else round(score, 4),
            complete=self.complete,
            parts=self.rounded_parts,
            left_out={name: self.left_out[name] for name in WEIGHTS if name in self.left_out},
            weight_left_out=round(self.weight_left_out, 4),
            # NaN and infinity, which a broken adapter gives, become null.
            figures=json.loads(TypeAdapter(Any).dump_json(self.figures)),
            notes=self.notes,
        )
        values: dict[str, Any] = as_json(record)
        return values
