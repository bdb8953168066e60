"""How many steps and how much disk: the planner's formulas that are not about memory or time.

All are pure functions of plain values and say how they came to their answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_trainer.config.choices import VIEWS
from lora_trainer.config.config import Precision
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, MASTER_BYTES

COUNTED_IMAGES = (20, 160)
"""A set of fewer pictures is trained as long as one of 20, or it would not be learned at all; one of more
than 160 as long as one of 160, as more passes no longer pay."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps and the sentence that explains them."""

    steps: int
    reason: str


def run_length(
    *,
    images: int,
    batch_size: int,
    views: int,
    samples: int | None = None,
    repeats: int = 1,
    regularisation: float = 0.0,
    concept: str = "any",
) -> Length:
    """Return the steps of a run over `images` different pictures; repeats shift weight, not length.

    images seen = views x images, those counted within `COUNTED_IMAGES`, at least `samples` of an epoch (None:
    `images`) over `repeats`, the fewest that a picture has: so that each is seen once or so; and
    `regularisation` images beside each of them. steps = images seen / batch size, rounded up. A `concept`
    may have fewer views.
    """
    fewest, most = COUNTED_IMAGES
    of_concept = VIEWS.get(concept, 1.0)
    seen = round(views * min(max(of_concept * images, fewest), most))
    seen = max(seen, math.ceil((images if samples is None else samples) / repeats))
    steps = math.ceil(seen * (1 + regularisation) / batch_size)
    beside = f", {regularisation:g} for regularisation beside each" if regularisation else ""
    whose = f"{concept}: " if concept in VIEWS else ""
    return Length(
        steps=steps,
        reason=(
            f"{whose}{round(of_concept * views)} views of each of {images} images, not fewer than of "
            f"{fewest} nor more than of {most}: {seen:,} seen at {batch_size} a step{beside}"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What decides the disk a run needs.

    `latents` count a mirrored image twice; `texts` are the different ones, the empty caption among them;
    `latent_elements` are those of the largest image, `mask_elements` those of its mask, `state_bytes` the
    optimizer's states.
    """

    latents: int
    texts: int
    latent_elements: int
    conditioning_bytes: int
    adapter_parameters: int
    state_bytes: int
    export_precision: Precision
    keep_states: int
    keep_exports: int
    mask_elements: int = 0


def disk_bytes(use: DiskUse) -> dict[str, int]:
    """Return bytes of cache, states and exports; one more state and export exist while saving."""
    latents = use.latents * 4 * (2 * use.latent_elements + use.mask_elements)
    texts = use.texts * use.conditioning_bytes
    state = MASTER_BYTES * use.adapter_parameters + use.state_bytes
    export = use.adapter_parameters * ELEMENT_BYTES[use.export_precision]
    return {
        "cache": latents + texts,
        "states": state * (use.keep_states + 1),
        "exports": export * (use.keep_exports + 2),
    }
