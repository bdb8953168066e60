"""The part of an image that is trained, as it is chosen on the page: what saving it changes in the dataset folder.

Inputs: an image as the trainer lists it; a box in shares of its sides. Output: the change of `crops.json`, which the
trainer reads (dataset/crops.py), for the journal of the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import split_name
from lora_trainer.dataset.crops import CROPS_FILE, Crop, read_crops, written
from lora_trainer.dataset.images import MIN_SIDE_PX, decode
from lora_trainer.dataset.listing import ImageFile

from .changes import Change, FileChange, inside, read_content

Box = tuple[float, float, float, float]


def changes(
    root: Path,
    picture: ImageFile,
    *,
    box: Box | None,
    settings: DataSettings,
    every: Sequence[ImageFile],
) -> list[Change]:
    """Return what writes the crop of an image; without a box, or with all of it, the whole image is trained.

    Raises RequestError for a box that is too small, InputError for files that cannot be read.
    """
    stem = split_name(CROPS_FILE)[0]
    if any(split_name(other.name)[0] == stem for other in every):
        raise RequestError(
            f"{CROPS_FILE} is the caption file of an image of this folder",
            fix="give that image another name",
        )
    width_px, height_px = decode(picture.path, settings=settings).image.size
    before = read_content(inside(root, CROPS_FILE))
    crops = {} if before is None else read_crops(before.encode("utf-8", "surrogateescape"))
    crop = None if box is None else in_pixels(box, width_px, height_px)
    if crop is None or crop == (0, 0, width_px, height_px):
        crops.pop(picture.name, None)
    elif min(crop.size_px) < MIN_SIDE_PX:
        raise RequestError(
            f"the crop has {crop.size_px[0]}x{crop.size_px[1]} px, each side needs {MIN_SIDE_PX} px",
            fix="choose a larger part",
        )
    else:
        crops[picture.name] = crop
    after = written(crops) if crops else None
    return [] if before == after else [FileChange(file=CROPS_FILE, before=before, after=after)]


def in_pixels(box: Box, width_px: int, height_px: int) -> Crop:
    """Return a box in shares of an image's sides as pixels that lie in it."""
    left, right = (min(width_px, max(0, round(edge * width_px))) for edge in box[::2])
    top, bottom = (min(height_px, max(0, round(edge * height_px))) for edge in box[1::2])
    return Crop(left, top, right, bottom)


def in_shares(crop: Crop, width_px: int, height_px: int) -> list[float]:
    """Return a crop as shares of its image's sides."""
    return [
        crop.left_px / width_px,
        crop.top_px / height_px,
        crop.right_px / width_px,
        crop.bottom_px / height_px,
    ]
