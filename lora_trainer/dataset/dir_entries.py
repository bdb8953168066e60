"""Entries of a dataset folder: their names and kinds, and findings about the files that are not used.

Inputs: directories, and the lists that a walk over the dataset has made. Outputs: entries without system files,
and findings about unused files, captions and masks without an image, and captions shared by several images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_trainer.common.errors import InputError
from lora_trainer.common.findings import Finding, named, note, shown, warning
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.captions import same_name, split_name
from lora_trainer.dataset.images import IMAGE_EXTENSIONS

Entry = os.DirEntry[str]
FolderKind = Literal["mask", "control", "class"]
_IGNORED_NAMES = frozenset({"__macosx", "thumbs.db", "desktop.ini"})
_ADVICE = {
    ".tar": "unpack the archives of a webdataset, images and captions have the same names",
    ".parquet": "write the images of the .parquet files as files and their captions as metadata.csv",
    ".zip": "unpack the archives",
}
"""Files that may hold the dataset itself, and how to make it readable."""
_DOCUMENT_STEMS = frozenset({"readme", "license", "licence"})

_FOLDER_KINDS: Mapping[str, FolderKind] = {
    **dict.fromkeys(("masks", "mask"), "mask"),
    **dict.fromkeys(
        ("control", "controls", "control_images", "conditioning", "conditioning_images"), "control"
    ),
    **dict.fromkeys(("class", "class_images", "class_data", "reg", "reg_images"), "class"),
    **dict.fromkeys(("regularization", "regularisation"), "class"),
    **dict.fromkeys(("regularization_images", "regularisation_images"), "class"),
}
"""Folders that other trainers keep beside the images to learn."""
CONTROL_SUFFIX = "-condlabel"
"""End of the name of a control image beside its image, as OneTrainer has it."""


def folder_kind(name: str) -> FolderKind | None:
    """Return the kind of images that a folder holds by its name; None: images to learn."""
    return _FOLDER_KINDS.get(name.casefold())


def entries_in(path: Path) -> list[Entry]:
    """Return a folder's entries by name, without system files and documents; raises InputError."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                (entry for entry in entries if _is_meant(entry.name)), key=lambda entry: entry.name
            )
    except OSError as error:
        what = f"cannot read folder {shown(str(path))} ({error.strerror or error})"
        raise InputError(what, fix="make it readable or move it away") from None


def _is_meant(name: str) -> bool:
    folded = name.casefold()
    stem, extension = split_name(folded)
    is_document = stem in _DOCUMENT_STEMS and extension not in IMAGE_EXTENSIONS
    return not (name.startswith(".") or folded in _IGNORED_NAMES or is_document)


def text_of(name: str) -> str:
    """Return a file name as text: it may hold bytes that are not UTF-8, which no JSON file can."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def holds(question: Callable[[], bool]) -> bool:
    """Ask something of an entry; one that cannot be followed is nothing."""
    try:
        return question()
    except OSError:  # a loop of links
        return False


def is_inside(path: str, real_root: str) -> bool:
    """Say whether a path, its links followed, lies in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(real_root)


def kind_of(entry: Entry) -> str:
    """Return the kind of an entry that is no regular file, for a message."""
    if entry.is_symlink():
        return "a link to no file"
    return "a folder" if holds(entry.is_dir) else "a pipe, socket or device"


@dataclass(frozen=True, kw_only=True)
class UnusedFiles:
    """Files by extension, caption files with the images they are used by, and masks of no image.

    `pictures` are the names of the images as `same_name` has them, without extension; `described`
    those of table rows. `excluded` is the folder of images taken out of the dataset. `second`: image, the source of
    its caption, and a further source that is not used.
    """

    settings: DataSettings
    ignored: Mapping[str, int]
    users: Mapping[str, Sequence[str]]
    pictures: frozenset[str]
    described: Collection[str]
    unclaimed_masks: Sequence[tuple[str, str]]
    excluded: Path | None
    second: Sequence[tuple[str, str, str]]

    def ignored_files(self) -> Iterator[Finding]:
        """Yield one note that counts the files of no use here."""
        if self.ignored:
            counts = ", ".join(
                f"{count} {suffix}" for suffix, count in sorted(self.ignored.items())
            )
            what = f"files that are neither image nor caption are ignored: {counts}"
            advice = next((_ADVICE[suffix] for suffix in _ADVICE if suffix in self.ignored), None)
            yield note("ignored-files", None, what, advice=advice or "nothing to do")

    def shared_captions(self) -> Iterator[Finding]:
        """Yield the caption files that stand for several images."""
        advice = "give each image a name of its own and a caption file of that name"
        for source, names in self.users.items():
            if len(names) > 1:
                what = f"is the caption of {len(names)} images: {named(names)}"
                yield warning("ambiguous-caption", source, what, advice=advice, code="IMG-08")

    def unused_captions(self) -> Iterator[Finding]:
        """Yield one warning that names caption files and metadata lines without an image."""
        unused = [
            source
            for source, names in self.users.items()
            # A caption file beside another of the same stem is not lost, only second choice.
            if not names
            and (source in self.described or same_name(split_name(source)[0]) not in self.pictures)
            and not self._is_excluded(source)
        ]
        if unused:
            what = f"captions without an image ({len(unused)}): {named(unused)}"
            advice = "name them as their images, or remove them"
            yield warning("unused-caption", None, what, advice=advice, code="CAP-01")

    def second_captions(self) -> Iterator[Finding]:
        """Yield one warning that names images with two captions that differ, and the source that counts."""
        if self.second:
            rows = [f"{name} ({first}, not {other})" for name, first, other in self.second]
            what = (
                f"images with two captions, of which the first counts ({len(rows)}): {named(rows)}"
            )
            advice = "remove one, or change the order of data.caption_extensions"
            yield warning("two-captions", None, what, advice=advice, code="CAP-01")

    def unused_masks(self) -> Iterator[Finding]:
        """Yield one row that names masks nobody asked for, or that have no image."""
        away = self._excluded_stems()
        unclaimed = [
            name for name, picture in self.unclaimed_masks if same_name(picture) not in away
        ]
        count, names = len(unclaimed), named(unclaimed)
        if count and self.settings.masks == "files":
            what = f"masks without an image ({count}): {names}"
            advice = "name them as their images, or remove them"
            yield warning("unused-mask", None, what, advice=advice)
        elif count:
            what = f"masks are not used ({count}): {names}"
            yield note("unused-mask", None, what, advice="--set data.masks=files to use them")

    def _excluded_stems(self) -> set[str]:
        """Return the names, without extension, of images taken out of the dataset, whose masks stay."""
        if self.excluded is None:
            return set()
        places = {name.rpartition("/")[0] for _, name in self.unclaimed_masks}
        inside = [self.excluded / folder for folder in places]
        return {
            same_name(split_name(Path(entry.path).relative_to(self.excluded).as_posix())[0])
            for folder in inside
            if folder.is_dir()
            for entry in entries_in(folder)
        }

    def _is_excluded(self, name: str) -> bool:
        """Say whether the image that a metadata line describes was taken out of the dataset."""
        return (
            self.excluded is not None
            and name in self.described
            and holds((self.excluded / name).is_file)
        )
