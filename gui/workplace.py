"""Where the interface works: the runs folder, its own files in it, and which folders it may name.

Inputs: the folders given at the start, and paths that somebody typed into a page. Outputs: absolute
folders. On 127.0.0.1 the person at the page is the one at the machine and may name any folder; a
server that others reach has `roots`, and nothing outside of them and of the runs folder exists for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.errors import InputError

OWN_FOLDER = ".gui"


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The runs folder, absolute, and the folders that may be named; None: all of this machine."""

    runs: Path
    roots: tuple[Path, ...] | None = None

    @property
    def own(self) -> Path:
        """The folder of what the interface itself keeps: drafts, jobs, thumbnails."""
        return self.runs / OWN_FOLDER

    def allows(self, path: Path) -> bool:
        """Whether a resolved path may be named in a page."""
        if self.roots is None:
            return True
        return any(path.is_relative_to(root) for root in (self.runs, *self.roots))

    def folder(self, text: str) -> Path:
        """Return the folder that was typed, absolute; raises InputError for what is none."""
        path = self.path(text, what="a folder with images")
        if not path.is_dir():
            raise InputError(f"there is no folder {path}", fix="type the path of an existing one")
        return path

    def path(self, text: str, *, what: str) -> Path:
        """Return an absolute path, which no option begins like; raises InputError."""
        stripped = text.strip().strip('"')  # file managers copy paths in quotes
        if not stripped:
            raise InputError("no path is given", fix=f"type the path of {what}")
        try:
            path = Path(stripped).expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as error:  # no such user, a NUL in the name
            raise InputError(f"{stripped!r} is no path: {error}", fix="type another one") from None
        if not self.allows(path):
            raise InputError(
                f"{path} lies outside of the folders that this server may read",
                fix="choose one inside of them, or name the folder with --datasets at the start",
            )
        return path
