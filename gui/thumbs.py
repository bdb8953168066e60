"""Small copies of pictures, made when a page first asks for one and kept under the runs folder.

Input: a picture of a dataset, read as training reads it: upright, transparency on white, refused
above the same number of pixels. Output: a JPEG in `<runs>/.gui/thumbs/`, named after path, time and
size of the picture, so that a changed one gets a new copy. The folder has a size limit.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from lora_trainer.common.files import CappedFolder, disk_error, write_atomic
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.images import ImageDecodeError, decode

SIZES_PX = (96, 192, 384, 768, 1536)
FOLDER = "thumbs"
LIMIT_BYTES = 512 * 2**20
_PRUNE_EVERY = 200
_JPEG_QUALITY = 85
_SETTINGS = DataSettings()


@dataclass(frozen=True, kw_only=True)
class Thumbnails:
    """The kept copies; `made` counts those of this process, to clear up now and then."""

    kept: CappedFolder
    made: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def under(cls, folder: Path) -> Thumbnails:
        """Return the copies kept under `folder`."""
        return cls(kept=CappedFolder(root=folder / FOLDER, limit_bytes=LIMIT_BYTES))

    def of(self, path: Path, size_px: int) -> Path:
        """Return the copy of a picture, at most `size_px` wide and high.

        Raises ImageDecodeError for what is not a picture, MachineError when the disk refuses.
        """
        copy = self._place(path, size_px)
        if not copy.is_file():
            data = _small(path, size_px)
            self.kept.create()
            try:
                copy.parent.mkdir(exist_ok=True)
            except OSError as error:
                raise disk_error(copy, error) from error
            write_atomic(copy, data, durable=False)
            if next(self.made) % _PRUNE_EVERY == 0:
                self.kept.prune([copy])
        return copy

    def _place(self, path: Path, size_px: int) -> Path:
        try:
            found = path.stat()
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
            raise ImageDecodeError(
                path, reason, code="IMG-09", fix="look whether it is there"
            ) from None
        seen = (str(path), found.st_mtime_ns, found.st_size, size_px)
        name = hashlib.sha256(repr(seen).encode("utf-8", errors="surrogateescape")).hexdigest()
        return self.kept.root / name[:2] / f"{name[:40]}.jpg"


def _small(path: Path, size_px: int) -> bytes:
    image = decode(path, settings=_SETTINGS).image
    image.thumbnail((size_px, size_px), Image.Resampling.LANCZOS, reducing_gap=2.0)
    output = io.BytesIO()
    image.save(output, "JPEG", quality=_JPEG_QUALITY)
    return output.getvalue()
