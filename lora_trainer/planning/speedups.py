"""Why blocks cannot be compiled, and in which shapes they are. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.config.declare import KEEP_ATTENTION
from lora_trainer.config.running import Config
from lora_trainer.costs.base_costs import BaseCosts

MOST_SHAPES = 16
"""Most shapes that are compiled; further shapes run as usual."""
PixelShape = tuple[int, int, int]
"""(width, height) in pixels, images at once."""


def obstacle_to_compiling(config: Config, costs: BaseCosts) -> str:
    """Return the first reason against compiling, empty without one; each was tried on every family."""
    adapter, objective = config.adapter, config.objective
    kind = "DoRA" if adapter.dora else adapter.kind
    drops = adapter.dropout or adapter.rank_dropout or adapter.module_dropout
    reasons = {
        f"peft's {kind} layers cannot be compiled in one piece": kind in ("DoRA", "loha", "lokr"),
        "adapter dropout differs by layer, so each block would be compiled separately": drops,
        "text lengths vary with this base, and each length would be compiled separately": (
            costs.texts_vary
        ),
        "the base's own prediction is computed for a varying number of samples, each compiled separately": (
            objective.prior == "base" or objective.preservation_weight
        ),
        "base.assistant computes its part in hooks, which cannot be compiled": config.base.assistant,
        "this gradient checkpointing keeps results of single kernels, which compiled code merges": (
            config.memory.gradient_checkpointing in KEEP_ATTENTION
        ),
        "memory.attention=xformers cannot be compiled": config.memory.attention == "xformers",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def pass_shapes(
    images_at_once: Mapping[tuple[int, int], int], *, batch_size: int, processes: int = 1
) -> list[PixelShape]:
    """Return the shapes that passes may have, full micro-batches first.

    A step draws images from all buckets, so any smaller number of images of a bucket occurs too; with a
    single bucket only the rest of the division does.
    """
    counts = {size: set(range(1, cap + 1)) for size, cap in images_at_once.items()}
    # Equal shares of one bucket: each step has the same full micro-batches and the same rest.
    if len(counts) == 1 and batch_size % processes == 0:
        ((size, cap),) = images_at_once.items()
        counts[size] = {cap, batch_size // processes % cap} - {0}
    missing = {
        (*size, count): images_at_once[size] - count
        for size, batch_counts in counts.items()
        for count in batch_counts
    }
    # The shapes that are compiled first are those that most steps have: full ones, and large ones.
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))
