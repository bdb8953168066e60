"""A memo of images that decoded, masks and caption texts: with it a second start opens no image."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import PIL
from pydantic import TypeAdapter, ValidationError

from lora_trainer.common.memo import HashMemo, MemoTable
from lora_trainer.common.processes import gc_disabled
from lora_trainer.dataset.captions import CaptionText
from lora_trainer.dataset.images import VerifiedImage

# Raise the number when what is kept of an image changes. Rows made with another Pillow are forgotten.
_MEMO_VERSION = f"2, Pillow {PIL.__version__}"
Value = TypeVar("Value")
MaskSize = tuple[int, int, int]
"""Width and height in pixels, and the brightest value."""


@dataclass(frozen=True)
class Remembered(Generic[Value]):
    """Values by the SHA-256 of the bytes that they were read from.

    Kept as JSON texts: of a hundred thousand, the lists in them would take 200 MB.
    """

    kind: TypeAdapter[Value]
    table: MemoTable

    def get(self, key: str) -> Value | None:
        """Return a value; None for one that must be read from the file."""
        text = self.table.get(key)
        try:
            return None if text is None else self.kind.validate_json(text)
        except ValidationError:
            return None

    def put(self, key: str, value: Any) -> None:
        """Remember a value: a tuple of plain values."""
        self.table.put(key, json.dumps(value))


def _table(folder: Path | None, name: str) -> MemoTable:
    return MemoTable.load(folder, name, version=_MEMO_VERSION)


class DatasetMemo:
    """Hashes of files by name, and images, captions and masks by hash: of a cache folder, or in memory only."""

    @gc_disabled()
    def __init__(self, folder: Path | None = None) -> None:
        self.hashes = HashMemo.load(folder)
        self.images = Remembered(TypeAdapter(VerifiedImage), _table(folder, "images"))
        self.captions = Remembered(TypeAdapter(CaptionText), _table(folder, "caption files"))
        self.masks = Remembered(TypeAdapter(MaskSize), _table(folder, "masks"))

    def save(self) -> None:
        """Write the new rows; raises MachineError."""
        for table in (self.hashes.table, self.images.table, self.captions.table, self.masks.table):
            table.save()
