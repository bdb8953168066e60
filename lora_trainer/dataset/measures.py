"""Numbers of an image: crispness, brightness, and a perceptual hash to find near copies.

Measured once per image, when it is decoded for the check, and remembered with its size, so that a second quality
report opens no file. Input is an RGB image, output plain numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_SIDE_PX = 1024
MIN_SIDE_PX = 48
_BLUR_WIDTH_PX = 9
_PRINT_SIDE = 8
PRINT_LENGTH_BITS = 2 * _PRINT_SIDE**2
_PRINT_MARGIN = 2
_COLOUR_SIDE = 4


class Measures(NamedTuple):
    """Numbers about one image, as the memo keeps them.

    `crispness` holds (side, value) pairs, largest first: value in [0, 1] after scaling the image
    to side squared pixels. `darkest` and `brightest` are the 1st and 99th percentile of luminance
    in [0, 1]. `structure` is a 128-bit difference hash, `colours` a 4x4 RGB miniature, both in hexadecimal.
    """

    crispness: tuple[tuple[int, float], ...]
    darkest: float
    brightest: float
    structure: str
    colours: str

    def crispness_at(self, side_px: float) -> float:
        """Return the crispness measured nearest to `side_px` squared pixels."""
        return min(self.crispness, key=lambda pair: abs(math.log(pair[0] / side_px)))[1]


def measure(image: Image.Image) -> Measures:
    """Measure an RGB image."""
    gray = _scaled(image.convert("L"), MAX_SIDE_PX)
    crispness = []
    level = gray
    while True:
        side_px = round(math.sqrt(level.width * level.height))
        crispness.append((side_px, round(crispness_of(np.asarray(level, dtype=np.float32)), 3)))
        if side_px < 2 * MIN_SIDE_PX or min(level.size) < 2:
            break
        level = level.reduce(2)
    darkest, brightest = np.percentile(np.asarray(level), (1, 99)) / 255
    return Measures(
        crispness=tuple(crispness),
        darkest=round(float(darkest), 3),
        brightest=round(float(brightest), 3),
        structure=_structure(gray),
        colours=image.resize((_COLOUR_SIDE, _COLOUR_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
        .tobytes()
        .hex(),
    )


def crispness_of(gray: NDArray[np.float32]) -> float:
    """Return how much of an image's variation a blur removes, in [0, 1]: little if it is blurred.

    1 - blur of Crete et al. 2007, "The blur effect: perception and estimation with a new
    no-reference perceptual blur metric", for the worse of the two directions; 0 for a flat image.
    """
    return min(_crispness_along(gray), _crispness_along(gray.T))


def _crispness_along(gray: NDArray[np.float32]) -> float:
    if gray.shape[1] <= _BLUR_WIDTH_PX:
        return 0.0
    sums = np.cumsum(gray, axis=1)  # whole numbers far below 2**24: exact in float32
    blurred = (sums[:, _BLUR_WIDTH_PX:] - sums[:, :-_BLUR_WIDTH_PX]) / _BLUR_WIDTH_PX
    margin = _BLUR_WIDTH_PX // 2 + 1
    sharp = gray[:, margin : margin + blurred.shape[1]]
    variation = np.abs(np.diff(sharp, axis=1))
    total = float(variation.sum())
    lost = np.maximum(0.0, variation - np.abs(np.diff(blurred, axis=1)))
    return float(lost.sum()) / total if total > 0 else 0.0


def same_colours(first: Measures, second: Measures, *, max_colour: float) -> bool:
    """Say whether two miniatures differ by at most `max_colour` of 255 in the mean."""
    ours, theirs = bytes.fromhex(first.colours), bytes.fromhex(second.colours)
    difference = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return difference <= max_colour * len(ours)


def _structure(gray: Image.Image) -> str:
    """Return a difference hash: is a cell clearly brighter than its left, its upper neighbour."""
    side = _PRINT_SIDE
    across = np.asarray(gray.resize((side + 1, side), Image.Resampling.BOX), dtype=np.int16)
    down = np.asarray(gray.resize((side, side + 1), Image.Resampling.BOX), dtype=np.int16)
    bits = (np.diff(across, axis=1) > _PRINT_MARGIN, np.diff(down, axis=0) > _PRINT_MARGIN)
    return np.packbits(np.concatenate([part.ravel() for part in bits])).tobytes().hex()


def _scaled(gray: Image.Image, side_px: int) -> Image.Image:
    factor = side_px / math.sqrt(gray.width * gray.height)
    if factor >= 1:
        return gray
    size = (max(1, round(gray.width * factor)), max(1, round(gray.height * factor)))
    return gray.resize(size, Image.Resampling.LANCZOS)
