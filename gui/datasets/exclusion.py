"""Taking pictures out of a dataset and putting them back: moves into `_excluded/`, nothing is deleted.

Input: pictures as the trainer lists them. Output: the changes that move a picture and its caption
file, both under a free name where theirs is taken. A caption file that other pictures use stays
with them, and the picture that goes gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from lora_trainer.common.errors import InputError
from lora_trainer.dataset.captions import extension_names, split_name
from lora_trainer.dataset.listing import EXCLUDED_FOLDER, ImageFile

from .changes import Change, FileChange, MoveChange, read_content


def exclude(
    chosen: Sequence[ImageFile],
    *,
    every: Sequence[ImageFile],
    root: Path,
    extensions: Sequence[str],
) -> list[Change]:
    """Return what moves pictures of the dataset into `_excluded/`; raises InputError for a link."""
    away = root / EXCLUDED_FOLDER
    return _Moves(root=root, source=root, target=away, extensions=extensions).of(chosen, every)


def put_back(
    chosen: Sequence[ImageFile],
    *,
    every: Sequence[ImageFile],
    root: Path,
    extensions: Sequence[str],
) -> list[Change]:
    """Return what moves excluded pictures back to where they were; `every` are the excluded ones."""
    away = root / EXCLUDED_FOLDER
    return _Moves(root=root, source=away, target=root, extensions=extensions).of(chosen, every)


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Moves from one folder to another, one after the other; remembers which names are taken."""

    root: Path
    source: Path
    target: Path
    extensions: Sequence[str]
    goals: dict[Path, str | None] = field(default_factory=dict)
    """What this step puts where: a caption's content, None for a picture."""

    def of(self, chosen: Sequence[ImageFile], every: Sequence[ImageFile]) -> list[Change]:
        leaving = {picture.name for picture in chosen}
        staying = {picture.sidecar for picture in every if picture.name not in leaving}
        moved: set[Path] = set()
        changes: list[Change] = []
        for picture in chosen:
            changes += self._picture(picture, kept={*staying, *moved})
            if picture.sidecar is not None:
                moved.add(picture.sidecar)
        return changes

    def _picture(self, picture: ImageFile, *, kept: set[Path | None]) -> Iterator[Change]:
        if picture.path.is_symlink():
            raise InputError(
                f"{picture.name} is a link, which would lead nowhere from another folder",
                fix="move it by hand",
            )
        sidecar = picture.sidecar
        content = None if sidecar is None else read_content(sidecar)
        goal = self._free_goal(picture, content)
        self.goals[goal] = None
        yield MoveChange(file=self._name(picture.path), to=self._name(goal))
        if sidecar is None:
            return
        beside = goal.with_name(_stem(goal) + _suffix(sidecar))
        there = self._content(beside)
        self.goals[beside] = content
        if sidecar in kept:  # another picture keeps it, or has taken it along in this step
            if there is None:
                yield FileChange(file=self._name(beside), before=None, after=content)
        elif there is not None:  # the same text lies there already
            yield FileChange(file=self._name(sidecar), before=content, after=None)
        else:
            yield MoveChange(file=self._name(sidecar), to=self._name(beside))

    def _free_goal(self, picture: ImageFile, content: str | None) -> Path:
        """Return a name for the picture where neither it nor a caption of other words is in the way."""
        folder = self.target / picture.path.parent.relative_to(self.source)
        stem, suffix = _stem(picture.path), _suffix(picture.path)
        for number in count(1):
            free = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")
            captions = [
                self._content(free.with_name(_stem(free) + extension))
                for extension in extension_names(self.extensions)
            ]
            if not self._exists(free) and all(found in (None, content) for found in captions):
                return free
        raise AssertionError  # numbers do not end

    def _content(self, path: Path) -> str | None:
        return self.goals[path] if path in self.goals else read_content(path)

    def _exists(self, path: Path) -> bool:
        return path in self.goals or path.exists() or path.is_symlink()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _stem(path: Path) -> str:
    return split_name(path.name)[0]


def _suffix(path: Path) -> str:
    return path.name[len(_stem(path)) :]
