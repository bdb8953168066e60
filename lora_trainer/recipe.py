"""What decides how much a run learns, and what may not: the one rule that ties updates, batch and rate together.

How much is learned is a fact of the family and the priority: updates (`train.views` of the pictures, over
the batch), `train.batch_size` and `optimizer.learning_rate` stand in `base` and `priorities` of a family's
presets. A hardware tier changes memory and speed alone, `TIER_SETTINGS`, so the same pictures are learned as
well on a small card as on a large one: at one resolution and precision the runs are the same up to rounding.

Whoever sets another batch gets fewer or more updates for the same images, and with them another rate: an
update of Adam moves about one learning rate whatever the batch, so the rate goes with the square root of
the batch (Malladi et al. 2022, arXiv 2205.10287: with a batch kappa times as large, rate times sqrt(kappa),
steps over kappa; updates x rate^2, how far the run gets, stays as it is. Adam's betas, which the paper moves
along, are left: their memory is short beside any of these runs).
"""

from __future__ import annotations

import math

TIER_SETTINGS = (
    "data.more_resolutions",
    "data.resolution",
    "hardware.",
    "memory.",
    "optimizer.name",
    "sampling.",
)
"""What a tier, or a cell of it, may set: a name, or a section with its dot."""


def is_for_tiers(key: str) -> bool:
    """Say whether a tier may set it."""
    return any(
        key == name or (name.endswith(".") and key.startswith(name)) for name in TIER_SETTINGS
    )


def rate_for_batch(rate: float, *, batch_size: int, preset_batch_size: int) -> float:
    """Return the learning rate for a batch when `rate` is for another, to four digits."""
    return float(f"{rate * math.sqrt(batch_size / preset_batch_size):.4g}")
