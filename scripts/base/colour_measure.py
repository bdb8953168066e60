"""Which of the palette's colours a small image's background and object have.

Input: an RGB image of one object on a plain background, drawn or generated. Output: two names of
`scenes.COLOURS`, the nearest by distance in CIE Lab 1976 (D65), where equal steps look about equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scenes import COLOURS

NAMES = tuple(COLOURS)
RING_FRACTION = 1 / 16
"""Width of the border that is taken for background, in fractions of the shorter side."""
CENTRE_FRACTION = 0.8
"""The object is looked for in this middle part of either side."""
DIFFERENT_DELTA_E = 15.0
"""A pixel this far from the background in Lab is not background; 2 is a just visible difference."""
MIN_OBJECT_FRACTION = 0.01
"""An object smaller than this share of the middle part is none."""

_LINEAR_TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
_WHITE_XYZ = _LINEAR_TO_XYZ.sum(axis=1)

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The colours of an image by name; `object_colour` is None where nothing stands out."""

    object_colour: str | None
    background_colour: str


def lab(rgb: NDArray[np.generic] | tuple[int, int, int]) -> Floats:
    """Return CIE Lab values [..., 3] of 8-bit sRGB values [..., 3]."""
    encoded = np.asarray(rgb, dtype=np.float64) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    ratio = linear @ _LINEAR_TO_XYZ.T / _WHITE_XYZ
    bent = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = bent[..., 0], bent[..., 1], bent[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


_PALETTE_LAB = lab(np.array(list(COLOURS.values())))


def nearest(colours_lab: Floats) -> NDArray[np.intp]:
    """Return the index into `NAMES` of the palette colour nearest to each Lab value [..., 3]."""
    differences: Floats = colours_lab[..., None, :] - _PALETTE_LAB
    indices: NDArray[np.intp] = np.linalg.norm(differences, axis=-1).argmin(axis=-1)
    return indices


def look(image: Image.Image) -> Seen:
    """Measure an image: the background by its border, the object by what differs from that.

    Of several colours in the object (a face, a flower's middle, a house's roof) the one with the
    most pixels counts; each pixel votes for its nearest palette colour, and the median of the
    winner's pixels is what is named.
    """
    pixels = np.asarray(image.convert("RGB"))
    background_rgb = np.median(pixels[_ring(pixels.shape[:2])], axis=0)
    background_lab = lab(background_rgb)
    middle = _middle(pixels)
    middle_lab = lab(middle)
    differs = np.linalg.norm(middle_lab - background_lab, axis=-1) > DIFFERENT_DELTA_E
    name = NAMES[int(nearest(background_lab))]
    if differs.mean() < MIN_OBJECT_FRACTION:
        return Seen(object_colour=None, background_colour=name)
    votes = nearest(middle_lab[differs])
    winner = np.bincount(votes, minlength=len(NAMES)).argmax()
    object_rgb = np.median(middle[differs][votes == winner], axis=0)
    return Seen(object_colour=NAMES[int(nearest(lab(object_rgb)))], background_colour=name)


def _ring(size: tuple[int, ...]) -> NDArray[np.bool_]:
    width_px = max(1, round(min(size) * RING_FRACTION))
    ring = np.ones(size, dtype=bool)
    ring[width_px:-width_px, width_px:-width_px] = False
    return ring


def _middle(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    down, across = (round(side * (1 - CENTRE_FRACTION) / 2) for side in pixels.shape[:2])
    return pixels[down : pixels.shape[0] - down, across : pixels.shape[1] - across]
