"""Aspect-ratio buckets: which sizes there are, which one an image gets, how it and its mask are cut to it.

Pure integer geometry in pixels: an image is scaled to cover its bucket and the overhang is cropped
away evenly on both sides. Nothing depends on other images, so adding one moves no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.families.base.facts import BaseFacts


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """The size images of similar shape are trained at."""

    width_px: int
    height_px: int

    def __str__(self) -> str:
        return f"{self.width_px}x{self.height_px}"

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.width_px, self.height_px


@dataclass(frozen=True, slots=True)
class Placement:
    """How one image fills its bucket: scaled to cover it, then cropped at (left, top)."""

    bucket: Bucket
    scaled_width_px: int
    scaled_height_px: int
    left_px: int
    top_px: int
    cropped_fraction: float
    """Share of the image's area that is cut away."""
    upscaled: bool
    """Whether the image is smaller than its bucket."""

    def cut(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        """Return the bucket-sized middle of an image or a mask of it."""
        scaled = image.resize((self.scaled_width_px, self.scaled_height_px), resampling)
        right_px, bottom_px = (
            self.left_px + self.bucket.width_px,
            self.top_px + self.bucket.height_px,
        )
        return scaled.crop((self.left_px, self.top_px, right_px, bottom_px))


def buckets_for(
    *, resolution_px: int, step_px: int, max_aspect: float, setting: str = "data.resolution"
) -> tuple[Bucket, ...]:
    """Return the sizes in multiples of `step_px` with at most `resolution_px` squared pixels.

    For each width the tallest that fits, and the same lying down, as long as the longer side is at
    most `max_aspect` times the shorter; the square is always among them. Raises RequestError
    when not even one step fits, in the words of `setting`.
    """
    if resolution_px < step_px:
        raise RequestError(
            f"{setting}={resolution_px} is below this base's bucket step of {step_px} px",
            fix=f"use {setting}={step_px} or more",
        )
    side_px = resolution_px // step_px * step_px
    sizes = {Bucket(side_px, side_px)}
    for width_px in range(step_px, resolution_px**2 // step_px + 1, step_px):
        height_px = resolution_px**2 // width_px // step_px * step_px
        longer_px, shorter_px = max(width_px, height_px), min(width_px, height_px)
        if shorter_px and longer_px <= max_aspect * shorter_px:
            sizes |= {Bucket(width_px, height_px), Bucket(height_px, width_px)}
    return tuple(sorted(sizes))


def place(width_px: int, height_px: int, *, buckets: Sequence[Bucket]) -> Placement:
    """Choose the bucket nearest in aspect ratio (in log space; the larger of equally near ones)."""

    def order(bucket: Bucket) -> tuple[float, int, Bucket]:
        ratio = (bucket.width_px * height_px) / (bucket.height_px * width_px)
        # Rounded so that equal distances on either side tie whatever the last bit says.
        return round(abs(math.log(ratio)), 12), -_area(bucket), bucket

    bucket = min(buckets, key=order)
    # Compared as whole numbers, so that an exact fit is never a rounding error away from one.
    if bucket.width_px * height_px >= bucket.height_px * width_px:
        scaled_width_px = bucket.width_px
        scaled_height_px = max(bucket.height_px, _rounded(height_px * bucket.width_px, width_px))
    else:
        scaled_height_px = bucket.height_px
        scaled_width_px = max(bucket.width_px, _rounded(width_px * bucket.height_px, height_px))
    return Placement(
        bucket=bucket,
        scaled_width_px=scaled_width_px,
        scaled_height_px=scaled_height_px,
        left_px=(scaled_width_px - bucket.width_px) // 2,
        top_px=(scaled_height_px - bucket.height_px) // 2,
        cropped_fraction=1 - _area(bucket) / (scaled_width_px * scaled_height_px),
        upscaled=bucket.width_px > width_px or bucket.height_px > height_px,
    )


def cut(image: Image.Image, placement: Placement, *, flip: bool) -> Image.Image:
    """Return the bucket-sized middle of an image (LANCZOS), mirrored left to right if `flip`."""
    part = placement.cut(image, Image.Resampling.LANCZOS)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else part


def mask_values(
    pixels: Image.Image, placement: Placement, *, flip: bool, factor: int
) -> NDArray[np.float32]:
    """Return float32 [1, H, W] in [0, 1]: means over the `factor` pixels a side of each latent.

    Placed as its image is; each pixel counts by its area, so no part is lost to rounding.
    """
    part = np.asarray(placement.cut(pixels.convert("F"), Image.Resampling.BOX))
    squares = part.reshape(part.shape[0] // factor, factor, part.shape[1] // factor, factor)
    values = squares.mean(axis=(1, 3), dtype=np.float64) / 255.0
    return np.ascontiguousarray(values[None, :, ::-1] if flip else values[None], dtype=np.float32)


# Returns the placements of an image of (width, height) pixels: one for each resolution it is trained at.
Place = Callable[[int, int], tuple[Placement, ...]]


def placing(data: DataSettings, *, resolution_px: int, step_px: int) -> Place:
    """Return the function that places images at `data.resolution` and `data.more_resolutions`; raises RequestError.

    `resolution_px` stands in for "auto", `step_px` is the base's. Images of one size share their placements,
    which saves time and memory, as a dataset has many images but few sizes.
    """
    side_px = resolution_px if data.resolution == "auto" else data.resolution
    sides_px = [("data.resolution", side_px)]
    sides_px += [("data.more_resolutions", more_px) for more_px in data.more_resolutions]
    max_aspect = data.max_aspect if data.buckets else 1.0
    buckets = [
        buckets_for(resolution_px=side, step_px=step_px, max_aspect=max_aspect, setting=setting)
        for setting, side in sides_px
    ]
    return cache(
        lambda width_px, height_px: tuple(place(width_px, height_px, buckets=b) for b in buckets)
    )


# Returns the placements of a reference of (width, height) pixels beside an image's: one for each of these.
PlaceReference = Callable[[int, int, tuple[Placement, ...]], tuple[Placement, ...]]


def placing_references(data: DataSettings, *, facts: BaseFacts) -> PlaceReference:
    """Return the function that places reference images beside images at each of their resolutions.

    A reference keeps its own shape and is as large as an image of that resolution at most, or as
    `data.reference_resolution` says. One that is read as channels of the image has the image's size, cut like it.
    Without a base that reads references it has no place.
    """
    if facts.references is None:
        return lambda width_px, height_px, beside: ()
    if facts.references.as_channels:
        return cache(
            lambda width_px, height_px, beside: tuple(
                place(width_px, height_px, buckets=[each.bucket]) for each in beside
            )
        )
    rule, own = facts.references, data.reference_resolution
    side_px = facts.resolution_px if data.resolution == "auto" else data.resolution
    sides_px = [each if own is None else own for each in (side_px, *data.more_resolutions)]
    token_px = facts.vae_factor * facts.patch

    def place_at(width_px: int, height_px: int, side_px: int) -> Placement:
        size = rule.size_px(width_px, height_px, side_px=side_px, token_px=token_px)
        return place(width_px, height_px, buckets=[Bucket(*size)])

    return cache(
        lambda width_px, height_px, _: tuple(
            place_at(width_px, height_px, side) for side in sides_px
        )
    )


def bucket_bounds(
    data: DataSettings, *, resolution_px: int, step_px: int
) -> tuple[int, int] | None:
    """Return the shortest and the longest side in pixels of all buckets at `data.resolution`; None without buckets."""
    if not data.buckets:
        return None
    side_px = resolution_px if data.resolution == "auto" else data.resolution
    buckets = buckets_for(resolution_px=side_px, step_px=step_px, max_aspect=data.max_aspect)
    # The buckets are sorted by width, and each is there lying down too.
    return buckets[0].width_px, buckets[-1].width_px


def _area(bucket: Bucket) -> int:
    return bucket.width_px * bucket.height_px


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
