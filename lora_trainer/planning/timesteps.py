"""Which timesteps a run will draw: the share of its draws in each twentieth of their range.

Inputs: the base, the objective and the sizes of the images in pixels; a base's shift may depend on the size. Output:
`PARTS` shares that add up to 1, from timestep 0 (no noise) to 1000 (noise alone), the same density that the training
draws from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.noise_levels import TIMESTEPS, Size, timesteps_of

PARTS = 20
# Evenly spread numbers that stand for the random ones of each size.
_DRAWS = 1000
# From few to many: for terminals that have these signs, and for all.
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def timestep_shares(
    facts: BaseFacts, settings: ObjectiveSettings, sizes_px: Iterable[Size]
) -> tuple[float, ...]:
    """Return the share of a run's timesteps in each of `PARTS` equal parts of 0 to 1000."""
    timestep, counts = timesteps_of(facts, settings), Counter(sizes_px)
    shares = [0.0] * PARTS
    for size_px, count in counts.items():
        weight = count / counts.total() / _DRAWS
        for draw in range(_DRAWS):
            drawn = timestep((draw + 0.5) / _DRAWS, size_px)
            shares[min(int(drawn / TIMESTEPS * PARTS), PARTS - 1)] += weight
    return tuple(shares)


def share_below(shares: Sequence[float], timestep: float) -> float:
    """Return the share of timesteps below one that is the border of two parts."""
    return sum(shares[: round(timestep / TIMESTEPS * len(shares))])


def shares_text(shares: Sequence[float], *, signs: str = BLOCKS) -> str:
    """Return the shares as a row of bars with two numbers, for a terminal."""
    most = max(shares)
    bars = "".join(
        signs[min(int(share / most * len(signs)), len(signs) - 1)] if share else " "
        for share in shares
    )
    return f"0 (clean) |{bars}| 1000 (noise); {shares_sentence(shares)}"


def shares_sentence(shares: Sequence[float]) -> str:
    """Return two numbers that tell much noise from little."""
    half, low = share_below(shares, 500), share_below(shares, 200)
    return f"{100 * half:.0f} % are below 500, {100 * low:.0f} % below 200"
