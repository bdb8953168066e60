"""Which part of an image counts: masks in files of their own, or the opaque part of the image.

Inputs: files, and where an image goes in its bucket. Outputs: whether a mask can be used, checked once
and remembered, and its values in [0, 1] at the size of the latents. White counts, black does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Placement
from lora_trainer.dataset.images import ImageDecodeError, VerifiedImage, decode

MASK_SUFFIX = "-masklabel"
"""End of the name of a mask beside its image, as OneTrainer has it; `folder_kind` tells folders of masks."""
MaskSize = tuple[int, int, int]
"""Width and height in pixels, and the brightest value."""
ASPECT_TOLERANCE = 0.02
"""What sides rounded to pixels make of a ratio, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """A mask that was checked; `of_alpha`: the image itself is the file, its transparency the mask."""

    path: Path
    content_hash: str
    of_alpha: bool


def mask_size(mask: Mask, *, settings: DataSettings) -> MaskSize:
    """Decode a mask and return its size; raises ImageDecodeError for one that is no image."""
    pixels = decode_mask(mask, settings=settings)
    return (*pixels.size, int(np.asarray(pixels).max()))


def refuse_unfit(mask: Mask, size: MaskSize, image: VerifiedImage) -> None:
    """Raise ImageDecodeError for a mask of another shape than its image, or all black."""
    width_px, height_px, brightest = size
    if brightest == 0:
        what = "is transparent everywhere" if mask.of_alpha else "is black everywhere"
        fix = "make visible what is to be learned, or remove it"
        raise ImageDecodeError(
            mask.path, f"{what}: nothing would be learned", code="IMG-04", fix=fix
        )
    allowed = ASPECT_TOLERANCE + 1 / min(width_px, height_px)
    if abs(math.log(width_px * image.height_px / (height_px * image.width_px))) > allowed:
        reason = (
            f"is {width_px}x{height_px}, not of the shape of its image, "
            f"{image.width_px}x{image.height_px}"
        )
        raise ImageDecodeError(
            mask.path, reason, code="IMG-04", fix="make it of the image as it is"
        )


def decode_mask(mask: Mask, *, settings: DataSettings) -> Image.Image:
    """Return a mask upright, mode L; raises ImageDecodeError, also for a file that has changed.

    Transparent parts of a mask file are black: only its drawn parts count.
    """
    if mask.of_alpha:
        alpha = decode(mask.path, settings=settings, content_hash=mask.content_hash).alpha
        assert alpha is not None, "only transparent images have such a mask"
        return alpha
    on_black = settings.model_copy(update={"alpha_background": "black"})
    return decode(mask.path, settings=on_black, content_hash=mask.content_hash).image.convert("L")


def mask_values(
    pixels: Image.Image, placement: Placement, *, flip: bool, factor: int
) -> NDArray[np.float32]:
    """Return float32 [1, H, W] in [0, 1]: means over the `factor` pixels a side of each latent.

    Placed as its image is; each pixel counts by its area, so no part is lost to rounding.
    """
    size = (placement.scaled_width_px, placement.scaled_height_px)
    scaled = pixels.convert("F").resize(size, Image.Resampling.BOX)
    right_px = placement.left_px + placement.bucket.width_px
    bottom_px = placement.top_px + placement.bucket.height_px
    part = np.asarray(scaled.crop((placement.left_px, placement.top_px, right_px, bottom_px)))
    squares = part.reshape(part.shape[0] // factor, factor, part.shape[1] // factor, factor)
    values = squares.mean(axis=(1, 3), dtype=np.float64) / 255.0
    return np.ascontiguousarray(values[None, :, ::-1] if flip else values[None], dtype=np.float32)
