"""Names for files that a browser or an archive brings: safe on every file system, unique, of a kind.

Inputs: names from anywhere. Outputs: a plain name, a free one, or why the file is not taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from lora_trainer.common.files import WINDOWS_DEVICES, WINDOWS_FORBIDDEN
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import METADATA_NAME, extension_names
from lora_trainer.dataset.images import IMAGE_EXTENSIONS

CAPTION_EXTENSIONS = frozenset(extension_names(DataSettings().caption_extensions))
# Taken apart into images (photos.py).
VIDEO_EXTENSIONS = frozenset({".mp4", ".m4v", ".mov"})
_TAKEN = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS | CAPTION_EXTENSIONS
_NAME_MAX_BYTES = 150


class Names:
    """Names for the files of one upload: a picture that gets a number shares it with its caption."""

    def __init__(self, existing: Iterable[str] = ()) -> None:
        self._stems_before = {Path(name).stem.casefold() for name in existing}
        self._given: set[str] = set()

    def free(self, name: str) -> str:
        """Return `name`, with a number where it is taken; case does not tell names apart."""
        path = Path(name)
        for stem in numbered(path.stem):
            found = f"{stem}{path.suffix}"
            if stem.casefold() in self._stems_before or found.casefold() in self._given:
                continue
            self._given.add(found.casefold())
            return found
        raise AssertionError("numbers do not end")


def numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def safe_name(name: str) -> str:
    """Return a name that every file system takes for one visible file; "" when nothing is left.

    Only the last part of a path counts: a browser that uploads a folder names it too.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    plain = "".join("_" if c in WINDOWS_FORBIDDEN or not c.isprintable() else c for c in last)
    stem, dot, extension = plain.strip(" .").rpartition(".")
    stem, extension = (stem, f"{dot}{extension}") if dot else (extension, "")
    room = _NAME_MAX_BYTES - len(extension.encode(errors="replace"))
    cut = stem.encode("utf-8", errors="replace")[: max(1, room)].decode("utf-8", errors="ignore")
    stem = cut.lstrip("-. ").rstrip(" .")  # no name may be taken for an option
    if stem.partition(".")[0].casefold() in WINDOWS_DEVICES:
        stem = f"_{stem}"
    return f"{stem}{extension}" if stem else ""


def reason_against(name: str) -> str:
    """Say why a file is not taken; an empty string for one that is."""
    if not name:
        return "has no usable name"
    extension = Path(name).suffix.lower()
    if name == METADATA_NAME or extension in _TAKEN:
        return ""
    return "is neither a picture nor a caption"


def is_image(name: str) -> bool:
    """Whether a file is a picture, or becomes some."""
    return Path(name).suffix.lower() in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS
