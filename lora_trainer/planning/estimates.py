"""The number of steps and the disk space of a run: the planner's formulas beside memory and time.

Pure functions of plain values; the steps come with a sentence that explains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_trainer.config.choices import VIEWS
from lora_trainer.config.config import Precision
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, MASTER_BYTES

COUNTED_IMAGES = (20, 160)
"""(fewest, most). Fewer than 20 images are trained as long as 20, or they would not be learned at all; more
than 160 as long as 160, as more passes no longer pay."""


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
    """Return the steps of a run over `images` different images; repeats shift weight, not length.

    images seen = views x images, with images clamped to `COUNTED_IMAGES`; at least one epoch's `samples`
    (None: `images`) / `repeats`, the fewest repeats of any image, so that each image is seen about once.
    `regularisation` regularisation images are trained for each of these. steps = images seen / batch size,
    rounded up. A `concept` may have fewer views.
    """
    fewest, most = COUNTED_IMAGES
    of_concept = VIEWS.get(concept, 1.0)
    images_seen = round(views * min(max(of_concept * images, fewest), most))
    images_seen = max(images_seen, math.ceil((images if samples is None else samples) / repeats))
    steps = math.ceil(images_seen * (1 + regularisation) / batch_size)
    beside = f", each with {regularisation:g} regularisation images" if regularisation else ""
    whose = f"{concept}: " if concept in VIEWS else ""
    return Length(
        steps=steps,
        reason=(
            f"{whose}{round(of_concept * views)} views of each of {images} images (counted as at least "
            f"{fewest} and at most {most}): {images_seen:,} images seen, {batch_size} a step{beside}"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Counts and sizes that decide the disk space of a run.

    `latents` counts a mirrored image twice; `texts` counts different captions, with the empty one.
    `latent_elements` and `mask_elements` are of the largest image, `state_bytes` the optimizer's states.
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
    # Each latent is stored as the mean and the deviation of the VAE's distribution, in fp32.
    latents = use.latents * 4 * (2 * use.latent_elements + use.mask_elements)
    texts = use.texts * use.conditioning_bytes
    state = MASTER_BYTES * use.adapter_parameters + use.state_bytes
    export = use.adapter_parameters * ELEMENT_BYTES[use.export_precision]
    return {
        "cache": latents + texts,
        "states": state * (use.keep_states + 1),
        "exports": export * (use.keep_exports + 2),
    }
