"""Crops that somebody has chosen: the part of an image that is trained in place of the whole.

`crops.json` in the dataset folder holds for the name of an image in the dataset [left, top, right, bottom] in pixels
of the upright image. The image files stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

CROPS_FILE = "crops.json"


class Crop(NamedTuple):
    """A part of an upright image, in pixels; `right_px` and `bottom_px` are the first that are outside."""

    left_px: int
    top_px: int
    right_px: int
    bottom_px: int

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.right_px - self.left_px, self.bottom_px - self.top_px

    @property
    def name(self) -> str:
        """The crop as names of cache entries have it."""
        return ",".join(map(str, self))

    def fits(self, width_px: int, height_px: int) -> bool:
        """Whether it is a part of an image of that size."""
        across = 0 <= self.left_px < self.right_px <= width_px
        return across and 0 <= self.top_px < self.bottom_px <= height_px

    def of_mask(self, mask: Image.Image, *, image_px: tuple[int, int]) -> Image.Image:
        """Return the same part of a mask, which may have another size than its image of `image_px`."""
        wide, high = mask.width / image_px[0], mask.height / image_px[1]
        left, top = round(self.left_px * wide), round(self.top_px * high)
        right, bottom = round(self.right_px * wide), round(self.bottom_px * high)
        return mask.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


def read_crops(data: bytes) -> dict[str, Crop]:
    """Return the crops in a file's bytes by the names of the images; raises ValueError that says what is wrong."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(rows, dict):
        raise ValueError("it is not an object of names and crops")
    return {str(name): _crop(name, row) for name, row in rows.items()}


def _crop(name: str, row: Any) -> Crop:
    if isinstance(row, list) and len(row) == 4 and all(type(edge) is int for edge in row):
        return Crop(*row)
    raise ValueError(f"the crop of {name} is not [left, top, right, bottom] in whole pixels")


def written(crops: Mapping[str, Crop]) -> str:
    """Return the text of the file, an image a line."""
    rows = (
        f"  {json.dumps(name)}: {json.dumps(list(crop))}" for name, crop in sorted(crops.items())
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"
