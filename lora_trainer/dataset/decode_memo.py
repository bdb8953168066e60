"""A memo of images that decoded, masks and caption texts: with it a second start opens no image.

One file in the cache folder, by the SHA-256 of the dataset's files. It only saves time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL

from lora_trainer.common.files import disk_error, sha256_bytes, write_atomic
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.captions import CaptionText
from lora_trainer.dataset.images import VerifiedImage, max_pixels
from lora_trainer.dataset.measures import Measures

# Raise the number when what is kept of an image changes.
_MEMO_VERSION = f"2, Pillow {PIL.__version__}"
_OF_ALPHA = " alpha"


@dataclass(kw_only=True)
class DecodeMemo:
    """Images and masks known to decode, and texts of caption files, by the SHA-256 of their bytes.

    One file in the cache folder: a checksum, then JSON. A damaged one, or one made with another
    Pillow, is the same as an empty one, because it only saves time. `file` None: nothing is kept.
    Entries are kept as JSON texts: of a hundred thousand, the lists in them would take 200 MB.
    """

    file: Path | None = None
    images: dict[str, str] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    _saved: bool = field(default=False, init=False, compare=False)
    """Whether the file holds all of this."""

    @classmethod
    def load(cls, file: Path) -> DecodeMemo:
        """Read the memo; never raises."""
        try:
            checksum, _, body = file.read_bytes().partition(b"\n")
            match json.loads(body) if checksum == sha256_bytes(body).encode() else None:
                case {
                    "made_with": made_with,
                    "images": dict(images),
                    "captions": dict(captions),
                    **others,
                }:
                    masks = others.get("masks")  # those of before had none
                    if made_with == _MEMO_VERSION:
                        memo = cls(
                            file=file,
                            images=images,
                            captions=captions,
                            masks=masks if isinstance(masks, dict) else {},
                        )
                        memo._saved = True
                        return memo
        except (OSError, ValueError, RecursionError):
            pass
        return cls(file=file)

    def image(self, content_hash: str, *, settings: DataSettings) -> VerifiedImage | None:
        """Return the memo's entry for these bytes, None if decoding with these settings could differ from it."""
        match _value(self.images, content_hash):
            case [int(width_px), int(height_px), [*notes], numbers, str(background)]:
                measures = Measures.from_json(numbers)
            case _:
                return None
        fits = width_px * height_px <= max_pixels(settings)
        if measures is None or not fits or background not in ("", settings.alpha_background):
            return None
        return VerifiedImage(
            width_px=width_px,
            height_px=height_px,
            notes=tuple(str(note) for note in notes),
            measures=measures,
            background=background,
        )

    def add_image(self, content_hash: str, image: VerifiedImage) -> None:
        """Remember an image that decoded."""
        numbers = image.measures.to_json()
        entry = [image.width_px, image.height_px, list(image.notes), numbers, image.background]
        self.images[content_hash] = json.dumps(entry)
        self._saved = False

    def caption(self, content_hash: str) -> CaptionText | None:
        """Return the text of the caption file with these bytes."""
        match _value(self.captions, content_hash):
            case [str(text), [*problems], [*lines]]:
                notes, read = tuple(map(str, problems)), tuple(map(str, lines))
                return CaptionText(text=text, problems=notes, lines=read)
        return None

    def add_caption(self, content_hash: str, caption: CaptionText) -> None:
        """Remember the text of a caption file."""
        entry = [caption.text, list(caption.problems), list(caption.lines)]
        self.captions[content_hash] = json.dumps(entry)
        self._saved = False

    def mask(self, content_hash: str, *, of_alpha: bool) -> tuple[int, int, int] | None:
        """Return width and height in pixels and the brightest value of a mask, or of these bytes' alpha."""
        match _value(self.masks, content_hash + _OF_ALPHA * of_alpha):
            case [int(width_px), int(height_px), int(brightest)]:
                return width_px, height_px, brightest
        return None

    def add_mask(self, content_hash: str, size: tuple[int, int, int], *, of_alpha: bool) -> None:
        """Remember the size and the brightest value of a mask, as `mask` returns them."""
        self.masks[content_hash + _OF_ALPHA * of_alpha] = json.dumps(size)
        self._saved = False

    def save(self) -> None:
        """Write the memo, if the file does not hold it yet; raises MachineError."""
        if self.file is None or self._saved:
            return
        content = {
            "made_with": _MEMO_VERSION,
            "images": self.images,
            "captions": self.captions,
            "masks": self.masks,
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(self.file, error) from error
        body = json.dumps(content).encode()
        write_atomic(self.file, sha256_bytes(body).encode() + b"\n" + body, durable=False)
        self._saved = True


def _value(entries: Mapping[str, str], key: str) -> Any:
    """Return the value of a JSON text in the memo; None where it is absent or no JSON."""
    try:
        return json.loads(entries[key])
    except (LookupError, ValueError, TypeError, RecursionError):
        return None
