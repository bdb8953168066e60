"""Names for files that a browser or an archive brings: safe on every file system, unique, of a kind.

Inputs: names and paths from anywhere. Outputs: a plain name or path, a free one, or why the file is not taken. Folders
are kept, because their names mean something: repeats, masks, reference images.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lora_trainer.common.files import WINDOWS_DEVICES, WINDOWS_FORBIDDEN
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import TABLE_NAMES, extension_names
from lora_trainer.dataset.images import IMAGE_EXTENSIONS
from lora_trainer.dataset.listing import MAX_DEPTH

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


def safe_path(parts: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return folders and name of a file that it may have in a dataset, and why it is not taken or ""."""
    safe = tuple(map(safe_name, parts))
    reason = reason_against(safe[-1])
    if len(safe) > MAX_DEPTH + 1 or not all(safe):
        reason = f"lies more than {MAX_DEPTH} folders deep"
    return safe, reason


def without_common_folder(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Drop the one folder that everything lies in, as when a folder was packed or dropped."""
    tops = {path[0] if len(path) > 1 else "" for path in paths}
    one_folder = len(tops) == 1 and "" not in tops
    return [path[1:] for path in paths] if one_folder else list(paths)


def reason_against(name: str) -> str:
    """Say why a file is not taken; an empty string for one that is."""
    if not name:
        return "has no usable name"
    extension = Path(name).suffix.lower()
    if name in TABLE_NAMES or extension in _TAKEN:
        return ""
    return "is neither a picture nor a caption"


def is_image(name: str) -> bool:
    """Whether a file is a picture, or becomes some."""
    return Path(name).suffix.lower() in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS
