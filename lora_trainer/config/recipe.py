"""The rule that ties updates, batch size and learning rate together, and the settings a tier may change.

Family and priority decide how much a run learns: updates (`train.views` of the images, over the batch),
`train.batch_size` and `optimizer.learning_rate` stand in `base` and `priorities` of a family's presets. A
hardware tier changes memory and speed only (`TIER_SETTINGS`), so a small GPU learns the same images as well
as a large one: at equal resolution and precision the runs are equal up to rounding.

Another batch size changes the number of updates for the same images, and with it the rate. One update of
Adam moves a weight by about one learning rate at any batch size, so the rate is scaled with the square root
of the batch (Malladi et al. 2022, arXiv 2205.10287: for a batch kappa times as large, rate times sqrt(kappa)
and steps over kappa keep updates x rate^2, the distance covered, constant). The paper also scales Adam's
betas; they stay fixed here because their memory is short compared with any of these runs.
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
"""Settings that a tier or a tier's cell may change: full names, or sections ending with a dot."""


def is_for_tiers(key: str) -> bool:
    """Return whether a tier may change the setting `key`."""
    return any(
        key == name or (name.endswith(".") and key.startswith(name)) for name in TIER_SETTINGS
    )


def rate_for_batch(rate: float, *, batch_size: int, preset_batch_size: int) -> float:
    """Scale `rate` from `preset_batch_size` to `batch_size`, rounded to four digits."""
    return float(f"{rate * math.sqrt(batch_size / preset_batch_size):.4g}")
