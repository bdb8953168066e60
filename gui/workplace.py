"""Where the interface works: the runs folder, its own files in it, and which folders it may name.

Inputs: the folders given at the start, and paths that somebody typed into a page. Outputs: absolute
folders. On 127.0.0.1 the person at the page is the one at the machine and may name any folder; a
server that others reach has `roots`, and nothing outside of them and of the runs folder exists for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from lora_trainer.common.errors import InputError, first_line
from lora_trainer.common.events import shown
from lora_trainer.common.files import user_path
from lora_trainer.dataset.slider_file import is_slider_file

from .own_load import Beside

OWN_FOLDER = ".gui"
# A folder of pictures in a dataset, or in its `_excluded/`; deeper ones are not read.
_DATASET_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The runs folder, absolute, the folders that may be named, None: all of this machine; and what else runs on it."""

    runs: Path
    roots: tuple[Path, ...] | None = None
    beside: Beside = field(default_factory=Beside, compare=False)

    @property
    def own(self) -> Path:
        """The folder of what the interface itself keeps: drafts, jobs, thumbnails."""
        return self.runs / OWN_FOLDER

    def allows(self, path: Path) -> bool:
        """Whether a resolved path may be named in a page."""
        if self.roots is None:
            return True
        return any(path.is_relative_to(root) for root in (self.runs, *self.roots))

    def dataset(self, text: str) -> Path:
        """Return the folder with images, or the file of a slider, that was typed; raises InputError."""
        path = self.path(text, what="a folder with images") if text.strip() else None
        return path if path and path.is_file() and is_slider_file(path) else self.folder(text)

    def folder(self, text: str) -> Path:
        """Return the folder that was typed, absolute; raises InputError for what is none.

        A link in it that leads to what may not be named is refused with the folder: its captions
        are shown, and its pictures trained on, by commands that follow links.
        """
        path = self.path(text, what="a folder with images")
        if not path.is_dir():
            raise InputError(
                f"the folder {shown(str(path))} does not exist",
                fix="type the path of an existing one",
            )
        outside = None if self.roots is None else self._link_out(path, depth=_DATASET_DEPTH)
        if outside is not None:
            raise InputError(
                f"{shown(str(outside))} is a link out of the folders that this server may read",
                fix="remove it, or name the folder it leads to with --datasets at the start",
            )
        return path

    def _link_out(self, folder: Path, *, depth: int) -> Path | None:
        try:
            entries = list(os.scandir(folder))
        except OSError:  # not readable for the commands either
            return None
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                # Not Path.resolve, which raises for links in a circle.
                if not self.allows(Path(os.path.realpath(path))):
                    return path
            elif depth > 1 and entry.is_dir():
                found = self._link_out(path, depth=depth - 1)
                if found is not None:
                    return found
        return None

    def path(self, text: str, *, what: str) -> Path:
        """Return an absolute path, which no option begins like; raises InputError."""
        stripped = text.strip().strip('"')  # file managers copy paths in quotes
        if not stripped:
            raise InputError("no path is given", fix=f"type the path of {what}")
        try:
            path = Path(user_path(stripped)).resolve()
            path.exists()  # raises for a name that is too long, as what is done with it would
        except (OSError, RuntimeError, ValueError) as error:  # no such user, a NUL in the name
            raise InputError(
                f"{stripped[:200]!r} is not a path: {first_line(error)[:300]}",
                fix="type another one",
            ) from None
        if not self.allows(path):
            raise InputError(
                f"{shown(str(path))} lies outside of the folders that this server may read",
                fix="choose one inside of them, or name the folder with --datasets at the start",
            )
        return path
