"""The names of reference images: which folder holds them, and which image a file is a reference of.

`cat.png` is an image to learn and `cat.txt` says what to change; `references/cat.png` is what it looked like before,
and `references_2/cat.png` a second image that the change refers to. Folders of references lie beside the images, or
beside the folder of the images (`after/cat.png`, `references/cat.png`); one for the images of several folders has
subfolders of their names. `control`, `control_1` and the like are names that other trainers have. A folder may hold
all references of an image, numbered: `control/cat_0.png`, `control/cat_1.png`. Pairs of one folder are called
`cat_start.png`, `cat_start2.png` and `cat_end.png`, as fal.ai has them. A table of captions may name the references
of an image; what it names counts before what names of files say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lora_trainer.dataset.captions import NAMES, same_name, split_name
from lora_trainer.dataset.images import IMAGE_EXTENSIONS

_FOLDER = re.compile(NAMES["reference_folders"])
_OWN_FOLDER = re.compile(r"references?")
_NUMBER = re.compile(r"(.+?)[-_ ]?([0-9]{1,2})")
_NUMBERED_FILE = re.compile(r"(.+)[-_]([0-9]{1,4})", re.DOTALL)
_START_OR_END = re.compile(r"(.+)[-_](?:(end)|start[-_]?([0-9]{0,2}))", re.DOTALL | re.IGNORECASE)
MAX_DEPTH = 2


class ReferenceFile(NamedTuple):
    """A file with a reference image, and its name in the dataset."""

    file: str
    name: str


@dataclass(frozen=True, kw_only=True)
class ReferenceFolder:
    """A folder of reference images; `beside` begins the names of the images that it may be for."""

    name: str
    beside: str
    place: int
    """Which of an image's references are in it: 1, 2, ..."""
    files: Mapping[str, ReferenceFile]
    """By the name that an image has from `beside` on, without extension, by `same_name`."""

    def of(self, picture: str, direct: frozenset[str]) -> tuple[str, ...]:
        """Return the keys in `files` of the references of an image of that name, the first one first.

        `direct` are the keys of the images that lie directly in `beside`: their references are not also those of
        images of the same name in a subfolder.
        """
        if not picture.startswith(self.beside):
            return ()
        key = same_name(split_name(picture[len(self.beside) :])[0])
        keys = [key]
        _, is_below, inner = key.partition("/")
        if is_below and inner not in direct:
            keys.append(inner)
        for each in keys:
            if each in self.files:
                return (each,)
            # `cat_1` of an image called so is not a reference of the image `cat`.
            if found := tuple(one for one in self._numbered.get(each, ()) if one not in direct):
                return found
        return ()

    @cached_property
    def _numbered(self) -> Mapping[str, Sequence[str]]:
        """The keys that end in a number, in its order, by what stands before it."""
        found: dict[str, list[tuple[int, str]]] = {}
        for key in self.files:
            if match := _NUMBERED_FILE.fullmatch(key):
                found.setdefault(match[1], []).append((int(match[2]), key))
        return {stem: [key for _, key in sorted(keys)] for stem, keys in found.items()}


def place_in(name: str) -> int | None:
    """Return which references of its images a folder of that name holds, 1 for the first; None: no references."""
    folded = name.casefold()
    numbered = _NUMBER.fullmatch(folded)
    if numbered and _FOLDER.fullmatch(numbered[1]):
        return int(numbered[2])
    return 1 if _FOLDER.fullmatch(folded) else None


def is_own_name(name: str) -> bool:
    """Return whether a folder's name says references in our words, and not in those of another trainer."""
    folded = name.casefold()
    numbered = _NUMBER.fullmatch(folded)
    return _OWN_FOLDER.fullmatch(numbered[1] if numbered else folded) is not None


def reference_folder(path: str, *, name: str, beside: str, place: int) -> ReferenceFolder:
    """Read the names in a folder of references, down to `MAX_DEPTH`; `name` is its name in the dataset."""
    files: dict[str, ReferenceFile] = {}
    _read(path, name, "", files)
    return ReferenceFolder(name=name, beside=beside, place=place, files=files)


def _read(path: str, name: str, inner: str, files: dict[str, ReferenceFile]) -> None:
    with os.scandir(path) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if entry.name.startswith("."):
            continue
        text = os.fsencode(entry.name).decode("utf-8", "backslashreplace")
        stem, extension = split_name(text)
        if extension in IMAGE_EXTENSIONS and entry.is_file():
            key = same_name(inner + stem)
            files.setdefault(key, ReferenceFile(entry.path, f"{name}/{inner}{text}"))
        elif inner.count("/") < MAX_DEPTH and entry.is_dir():
            _read(entry.path, name, f"{inner}{text}/", files)


def matched(
    pictures: Iterable[str], folders: Sequence[ReferenceFolder]
) -> tuple[dict[str, tuple[ReferenceFile, ...]], list[str]]:
    """Return the references of each image by its name, the first one first, and the names of unused references."""
    names = list(pictures)
    direct = {
        folder.beside: frozenset(
            same_name(split_name(name[len(folder.beside) :])[0])
            for name in names
            if name.startswith(folder.beside) and "/" not in name[len(folder.beside) :]
        )
        for folder in folders
    }
    ordered = sorted(folders, key=lambda folder: (folder.place, folder.name))
    used: set[tuple[str, str]] = set()
    references: dict[str, tuple[ReferenceFile, ...]] = {}
    for name in names:
        found = [
            (folder, key) for folder in ordered for key in folder.of(name, direct[folder.beside])
        ]
        used |= {(folder.name, key) for folder, key in found}
        if found:
            references[name] = tuple(folder.files[key] for folder, key in found)
    unused = [
        file.name
        for folder in ordered
        for key, file in folder.files.items()
        if (folder.name, key) not in used
    ]
    return references, unused


def images_of(reference: str) -> frozenset[str]:
    """Return the names that an image with a reference of that name can have, without extension, by `same_name`."""
    *folders, file = reference.split("/")
    stem = same_name(split_name(file)[0])
    stems = {stem}
    if match := _NUMBERED_FILE.fullmatch(stem):
        stems.add(match[1])
    if found := start_and_end(stem):
        stems.add(f"{found[0]}_end")
    where = [same_name(folder) for folder in folders if place_in(folder) is None]
    return frozenset("/".join([*where, each]) for each in stems)


@dataclass(frozen=True, kw_only=True)
class StartsAndEnds:
    """Names of images of one folder that are pairs by their ends: `cat_start`, `cat_start2`, `cat_end`."""

    starts: Mapping[str, tuple[str, ...]]
    """The references of each image by its name, the first one first; none for an end without a start."""
    alone: tuple[str, ...]
    """References without an image."""

    @property
    def references(self) -> frozenset[str]:
        """All names that are references, and not images to learn."""
        return frozenset(self.alone).union(*self.starts.values())


def start_and_end(stem: str) -> tuple[str, bool, int] | None:
    """Return the common part of the names of a pair, whether this is its end, and the number of a start from 1 on."""
    match = _START_OR_END.fullmatch(stem)
    return match and (match[1], match[2] is not None, int(match[3] or 1))


def starts_and_ends(pictures: Collection[str]) -> StartsAndEnds | None:
    """Return the pairs among the names of one folder's images; None if these are the names of less than half of them.

    A single `race_start.jpg` among photographs is an image like the others.
    """
    ends: dict[str, str] = {}
    starts: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(pictures):
        if found := start_and_end(same_name(split_name(name)[0])):
            root, is_end, number = found
            if is_end:
                ends.setdefault(root, name)
            else:
                starts.setdefault(root, []).append((number, name))
    pairs = {
        name: tuple(start for _, start in sorted(starts.get(root, ())))
        for root, name in ends.items()
    }
    in_pairs = sum(1 + len(found) for found in pairs.values() if found)
    if 2 * in_pairs < len(pictures) or not in_pairs:
        return None
    alone = (name for root, found in starts.items() if root not in ends for _, name in found)
    return StartsAndEnds(starts=pairs, alone=tuple(sorted(alone)))
