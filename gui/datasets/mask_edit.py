"""A mask as it is painted: read from where the trainer reads it, what saving one changes, and what training sees.

Inputs: an image as the trainer lists it; a PNG from a browser, white where the image counts. Outputs: the
mask and the crops of the image as data URLs, and changes of the dataset folder for its journal. A mask goes
to the file that the image has one in already, else to `NAME-masklabel.png` beside it.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Bucket, Placement, cut, place
from lora_trainer.dataset.captions import split_name
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.dataset.mask_names import MASK_SUFFIX
from lora_trainer.dataset.masks import read_mask

from .changes import Change, FileChange, inside, read_content
from .crop_edit import in_shares
from .subject import is_here, subject_png

# Of a mask: the trainer takes means over the pixels of a latent, so more would change nothing.
MAX_SIDE_PX = 1024
MAX_PNG_BYTES = 4 << 20
_SHOWN_PX = 384
_DATA = "data:image/png;base64,"


@dataclass(frozen=True, kw_only=True)
class MaskEdit:
    """The mask of one image of a dataset folder."""

    root: Path
    picture: ImageFile
    settings: DataSettings

    def shown(self, *, bucket: str) -> dict[str, Any]:
        """Return the mask and what training sees of the image; an empty `bucket` is not known yet.

        Raises InputError for an image or a mask that cannot be read.
        """
        image = decode(self.picture.path, settings=self.settings).image
        width_px, height_px = _size(image)
        crop = self.picture.crop
        has_crop = crop is not None and crop.fits(*image.size)
        return {
            "image_px": list(image.size),
            "crop": in_shares(crop, *image.size) if crop and has_crop else None,
            "width_px": width_px,
            "height_px": height_px,
            "mask": self._mask_url((width_px, height_px)),
            "finds_subject": is_here(),
            "seen": list(
                self._seen(
                    image, crop=crop if crop and has_crop else (0, 0, *image.size), bucket=bucket
                )
            ),
        }

    def subject(self) -> str:
        """Return a mask of the subject as a data URL, for the page to paint on; see `subject` for what is raised."""
        image = decode(self.picture.path, settings=self.settings).image
        return _DATA + base64.b64encode(subject_png(image.resize(_size(image)))).decode()

    def changes(self, painted: str) -> list[Change]:
        """Return what writes a painted mask, a data URL; an empty text removes the mask.

        Raises RequestError for what is not a mask of this image, InputError.
        """
        there = self.picture.mask
        target = there if there is not None and there.suffix.lower() == ".png" else self._beside
        after = None if not painted else self._png(painted).decode("utf-8", "surrogateescape")
        changes = [self._change(target, after)]
        if there is not None and there != target:  # of another format: the new one takes its place
            changes.append(self._change(there, None))
        return [change for change in changes if change.before != change.after]

    def _change(self, path: Path, after: str | None) -> FileChange:
        file = path.relative_to(self.root).as_posix()
        return FileChange(file=file, before=read_content(inside(self.root, file)), after=after)

    @property
    def _beside(self) -> Path:
        stem = split_name(self.picture.path.name)[0]
        return self.picture.path.with_name(f"{stem}{MASK_SUFFIX}.png")

    def _png(self, painted: str) -> bytes:
        """Return the painted mask in greys and in the shape of its image; raises RequestError."""
        try:
            data = base64.b64decode(painted.removeprefix(_DATA), validate=True)
            if not painted.startswith(_DATA) or len(data) > MAX_PNG_BYTES:
                raise ValueError("no small PNG")
            with Image.open(io.BytesIO(data), formats=["PNG"]) as opened:
                if max(opened.size) > 2 * MAX_SIDE_PX:
                    raise ValueError("too many pixels")
                pixels = opened.convert("L")
        except (ValueError, binascii.Error, OSError, SyntaxError) as error:
            raise RequestError(f"this is not a mask: {error}", fix="load the page again") from None
        if not np.asarray(pixels).any():
            raise RequestError(
                "nothing is painted, and nothing would be learned",
                fix="paint what counts, or press Remove the mask",
            )
        image = decode(self.picture.path, settings=self.settings).image
        return _png_bytes(pixels.resize(_size(image), Image.Resampling.BILINEAR))

    def _mask_url(self, size_px: tuple[int, int]) -> str | None:
        mask = self.picture.mask
        if mask is None:
            return None
        pixels = read_mask(mask, settings=self.settings)[0]
        return _DATA + base64.b64encode(_png_bytes(pixels.resize(size_px))).decode()

    def _seen(
        self, whole: Image.Image, *, crop: tuple[int, int, int, int], bucket: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the crops that are trained, made by the trainer's own functions, the mirrored one too.

        `part` is what of the whole image that is, in shares of it: there lies the part of the mask that counts for it.
        """
        width, _, height = bucket.partition("x")
        if not (width.isdigit() and height.isdigit()):
            return
        image = whole.crop(crop)
        placement = place(*image.size, buckets=[Bucket(int(width), int(height))])
        part = _part(placement, crop=crop, whole_px=whole.size)
        for flip in (False, True) if self.settings.flip else (False,):
            pixels = cut(image, placement, flip=flip)
            pixels.thumbnail((_SHOWN_PX, _SHOWN_PX))
            size = f"{width} \u00d7 {height} px"
            said = f"cropped to {size}, mirrored" if flip else f"cropped to {size}"
            yield {"said": said, "src": _jpeg_url(pixels), "part": part, "is_mirrored": flip}


def _part(
    placement: Placement, *, crop: tuple[int, int, int, int], whole_px: tuple[int, int]
) -> list[float]:
    """Return the edges of what a placement keeps of a crop, in shares of the whole image."""
    kept = (
        placement.left_px / placement.scaled_width_px,
        placement.top_px / placement.scaled_height_px,
        (placement.left_px + placement.bucket.width_px) / placement.scaled_width_px,
        (placement.top_px + placement.bucket.height_px) / placement.scaled_height_px,
    )
    sizes = (crop[2] - crop[0], crop[3] - crop[1])
    return [
        (crop[at % 2] + share * sizes[at % 2]) / whole_px[at % 2] for at, share in enumerate(kept)
    ]


def _size(image: Image.Image) -> tuple[int, int]:
    """Return the size of an image's mask: its own, but for large ones."""
    share = min(1.0, MAX_SIDE_PX / max(image.size))
    return max(1, round(image.width * share)), max(1, round(image.height * share))


def _png_bytes(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    return data.getvalue()


def _jpeg_url(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, format="JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
