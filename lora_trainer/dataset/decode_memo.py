"""A memo of images that decoded, masks and caption texts: with it a second start opens no image.

Three tables by the SHA-256 of the dataset's files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL

from lora_trainer.common.memo import MemoTable
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.captions import CaptionText
from lora_trainer.dataset.images import VerifiedImage, max_pixels
from lora_trainer.dataset.measures import Measures

# Raise the number when what is kept of an image changes.
_MEMO_VERSION = f"2, Pillow {PIL.__version__}"
_OF_ALPHA = " alpha"


def _table(name: str, folder: Path | None = None) -> MemoTable:
    if folder is None:
        return MemoTable(name=name, version=_MEMO_VERSION)
    return MemoTable.load(folder, name, version=_MEMO_VERSION)


@dataclass(frozen=True, kw_only=True)
class DecodeMemo:
    """Images and masks known to decode, and texts of caption files, by the SHA-256 of their bytes.

    Entries are kept as JSON texts: of a hundred thousand, the lists in them would take 200 MB. Those made
    with another Pillow are forgotten.
    """

    images: MemoTable = field(default_factory=lambda: _table("images"))
    captions: MemoTable = field(default_factory=lambda: _table("caption files"))
    masks: MemoTable = field(default_factory=lambda: _table("masks"))

    @classmethod
    def load(cls, folder: Path) -> DecodeMemo:
        """Read the memo of a cache folder; never raises."""
        return cls(
            images=_table("images", folder),
            captions=_table("caption files", folder),
            masks=_table("masks", folder),
        )

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
        self.images.put(content_hash, json.dumps(entry))

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
        self.captions.put(content_hash, json.dumps(entry))

    def mask(self, content_hash: str, *, of_alpha: bool) -> tuple[int, int, int] | None:
        """Return width and height in pixels and the brightest value of a mask, or of these bytes' alpha."""
        match _value(self.masks, content_hash + _OF_ALPHA * of_alpha):
            case [int(width_px), int(height_px), int(brightest)]:
                return width_px, height_px, brightest
        return None

    def add_mask(self, content_hash: str, size: tuple[int, int, int], *, of_alpha: bool) -> None:
        """Remember the size and the brightest value of a mask, as `mask` returns them."""
        self.masks.put(content_hash + _OF_ALPHA * of_alpha, json.dumps(size))

    def save(self) -> None:
        """Write the new rows; raises MachineError."""
        for table in (self.images, self.captions, self.masks):
            table.save()


def _value(table: MemoTable, key: str) -> Any:
    """Return the value of a JSON text in the memo; None where it is absent or no JSON."""
    try:
        return json.loads(table.get(key) or "null")
    except (ValueError, RecursionError):
        return None
