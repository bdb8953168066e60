"""The names of mask files: which image a file is the mask of, as other trainers and tools name them.

`NAME-masklabel.png` (OneTrainer), `NAME_mask.png` (fal.ai, ComfyUI), `NAME.mask.png` beside `NAME.src.jpg`
(cloneofsimo's lora), `mask_NAME.png`, `NAME_matte.png`, `NAME_seg.png`; in a folder of masks the name of the image
(ai-toolkit, SimpleTuner, diffusion-pipe, sd-scripts), with its extension too (`NAME.jpg.png`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from lora_trainer.dataset.captions import same_name, split_name

# The name that is written here; a file of such a name is never an image to learn.
MASK_SUFFIX = "-masklabel"
_MARK = r"(?:mask[-_ ]?label|masks?|segmentation|seg|matte)"
_BEHIND = re.compile(rf"(.+?)[-_. ]+{_MARK}", re.IGNORECASE | re.DOTALL)
_BEFORE = re.compile(rf"{_MARK}[-_. ]+(.+)", re.IGNORECASE | re.DOTALL)
# What cloneofsimo's lora writes behind the name of an image that has a mask.
_OF_SOURCE = ".src"
_FOLDER = re.compile(r"(.+?)[-_. ]+(?:masks?|segmentations?|mattes?)", re.IGNORECASE | re.DOTALL)


def masked_names(stem: str) -> Iterator[str]:
    """Yield the names, without extension, of images that a file is the mask of if they exist, best first."""
    for pattern in (_BEHIND, _BEFORE):
        match = pattern.fullmatch(stem)
        if match:
            yield match[1]
            yield match[1] + _OF_SOURCE


def masked_folder(name: str) -> str | None:
    """Return the folder whose images a folder has masks of by its name: `10_cat` of `10_cat_masks`."""
    match = _FOLDER.fullmatch(name)
    return match[1] if match else None


def by_name(pictures: Iterable[str]) -> dict[str, str]:
    """Return the key of each image (its stem, by `same_name`) by the names under which a mask may have it."""
    keys: dict[str, str] = {}
    for picture in pictures:
        stem = same_name(split_name(picture)[0])
        keys[stem] = stem
        keys.setdefault(same_name(picture), stem)
    return keys


def key_of_mask(stem: str, images: Mapping[str, str], *, in_mask_folder: bool) -> str | None:
    """Return the key of the image that a file is the mask of, of `images` as `by_name` has them; None for no mask.

    In a folder of masks, and with the name that is written here, a file without an image is a mask too.
    """
    own = [stem] if in_mask_folder else []
    for name in map(same_name, (*own, *masked_names(stem))):
        if name in images:
            return images[name]
    if in_mask_folder or stem.endswith(MASK_SUFFIX):
        return same_name(stem.removesuffix(MASK_SUFFIX) or stem)
    return None
