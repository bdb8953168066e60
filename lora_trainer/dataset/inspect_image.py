"""Inspection of one listed image: its hash, its size and numbers, its mask and its caption.

`known` answers from the memo and opens no file; `inspect_image` reads the files that the memo lacks. Both give the
same. `inspect_image` returns a finding in place of an image that cannot be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.files import sha256_bytes
from lora_trainer.common.findings import Finding, unusable
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.captions import (
    JSON_SIDECAR,
    MAX_CAPTION_BYTES,
    CaptionText,
    GivenCaption,
    is_json,
    read_caption_file,
)
from lora_trainer.dataset.decode_memo import DecodeMemo
from lora_trainer.dataset.image_text import IMAGE_TEXT, read_image_text
from lora_trainer.dataset.images import ImageDecodeError, VerifiedImage, verify
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.dataset.masks import Mask, check_mask

BAD_MASK = "bad-mask"
"""Kind of the findings about masks that cannot be used, which nobody wants to train without."""

_OF_IMAGE = " image"
"""Ends the memo's key of a caption inside an image, after the hash of the image's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedImage:
    """An image that can be used. `sidecar`: text of its caption file; `inside`: text inside the image, if read."""

    picture: ImageFile
    content_hash: str
    image: VerifiedImage
    sidecar: CaptionText | None
    mask: Mask | None
    inside: CaptionText | None = None

    @property
    def caption(self) -> GivenCaption:
        """The caption and its source: its file, a table, the text inside the image, a name, or none."""
        if self.sidecar is not None and self.sidecar.text:
            name = self.picture.sidecar_name or ""
            return GivenCaption(text=self.sidecar.text, lines=self.sidecar.lines, source=name)
        stand_ins = [stand_in for stand_in in self.picture.stand_ins if stand_in.text]
        table = next((stand_in for stand_in in stand_ins if not stand_in.of_name), None)
        if table is None and self.inside is not None and self.inside.text:
            return GivenCaption(text=self.inside.text, source=IMAGE_TEXT)
        return table or (stand_ins[0] if stand_ins else GivenCaption(text="", source=""))


def known(
    picture: ImageFile, *, settings: DataSettings, memo: HashMemo, verified: DecodeMemo
) -> InspectedImage | None:
    """Return the memo's facts of an image whose files have not changed; None: it must be read.

    An image with a mask is always read: the memo does not hold whether the two fit.
    """
    if picture.mask is not None or settings.masks == "alpha":
        return None
    content_hash = memo.known(picture.file)
    image = None if content_hash is None else verified.image(content_hash, settings=settings)
    if content_hash is None or image is None:
        return None
    sidecar = None
    if picture.sidecar_file is not None:
        caption_hash = memo.known(picture.sidecar_file)
        sidecar = (
            None
            if caption_hash is None
            else verified.caption(_key(caption_hash, picture.sidecar_file))
        )
        if sidecar is None:
            return None
    inside = None
    if settings.caption_fallback == "metadata":
        inside = verified.caption(content_hash + _OF_IMAGE)
        if inside is None:
            return None
    return InspectedImage(
        picture=picture,
        content_hash=content_hash,
        image=image,
        sidecar=sidecar,
        mask=None,
        inside=inside,
    )


def inspect_image(
    picture: ImageFile, *, settings: DataSettings, memo: HashMemo, verified: DecodeMemo
) -> InspectedImage | Finding:
    """Hash and, unless these bytes are known, decode one image; read its caption file."""
    try:
        content_hash = memo.sha256(picture.path)
        image = verified.image(content_hash, settings=settings)
        if image is None:
            image = verify(picture.path, settings=settings, content_hash=content_hash)
            verified.add_image(content_hash, image)
        inside = None
        if settings.caption_fallback == "metadata":
            inside = _image_text(picture.path, content_hash, settings, verified)
    except ImageDecodeError as fault:
        return unusable(picture.name, fault.reason, advice=fault.fix, code=fault.code)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        return unusable(picture.name, reason, advice="make it readable", code="IMG-09")
    try:
        mask = _mask(picture, image, content_hash=content_hash, settings=settings, memo=memo)
        if mask is not None:
            check_mask(mask, image, settings=settings, verified=verified)
    except ImageDecodeError as fault:
        return _bad_mask(picture, fault.reason, advice=fault.fix, code=fault.code)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        return _bad_mask(picture, reason, advice="make it readable or remove it", code="IMG-09")
    sidecar = None if picture.sidecar is None else _sidecar(picture.sidecar, memo, verified)
    return InspectedImage(
        picture=picture,
        content_hash=content_hash,
        image=image,
        sidecar=sidecar,
        mask=mask,
        inside=inside,
    )


def _image_text(
    path: Path, content_hash: str, settings: DataSettings, verified: DecodeMemo
) -> CaptionText:
    """Return the caption inside an image, from the memo where its bytes were read before."""
    text = verified.caption(content_hash + _OF_IMAGE)
    if text is None:
        text = read_image_text(path, settings=settings, content_hash=content_hash)
        verified.add_caption(content_hash + _OF_IMAGE, text)
    return text


def _mask(
    picture: ImageFile,
    image: VerifiedImage,
    *,
    content_hash: str,
    settings: DataSettings,
    memo: HashMemo,
) -> Mask | None:
    """Return where an image's mask is, if it has one; raises OSError for a file that cannot be read."""
    if picture.mask is not None:
        return Mask(path=picture.mask, content_hash=memo.sha256(picture.mask), of_alpha=False)
    if settings.masks == "alpha" and image.background:
        return Mask(path=picture.path, content_hash=content_hash, of_alpha=True)
    return None


def _bad_mask(picture: ImageFile, reason: str, *, advice: str, code: str) -> Finding:
    return Finding(
        kind=BAD_MASK,
        severity="error",
        file=picture.mask_name or picture.name,
        what=reason,
        advice=advice,
        code=code,
    )


def _sidecar(path: Path, memo: HashMemo, verified: DecodeMemo) -> CaptionText:
    try:
        remembered = verified.caption(_key(memo.sha256(path), path.name))
        if remembered is not None:
            return remembered
        with path.open("rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
    except OSError as error:
        return CaptionText(text="", problems=(f"cannot be read ({error.strerror or error})",))
    caption = read_caption_file(path.name, data)
    # Under the hash of what was read: the file may have changed since the memo looked.
    verified.add_caption(_key(sha256_bytes(data), path.name), caption)
    return caption


def _key(content_hash: str, file_name: str) -> str:
    """Return the memo's key of a caption file: the same bytes say another thing as JSON than as text."""
    return content_hash + JSON_SIDECAR if is_json(file_name) else content_hash
