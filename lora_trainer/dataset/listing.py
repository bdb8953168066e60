"""What lies in a dataset folder, from directory entries alone: images, their captions, oddities.

The folder itself, `N_name` folders (N repeats, "name" where there is no caption) and plain
subfolders are read, one level deep, but for `_excluded`; masks are no images. Only regular files
are listed, so nothing later can block on a pipe; the only files opened here are `metadata.jsonl`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lora_trainer.common.errors import InputError, RequestError, did_you_mean
from lora_trainer.common.findings import Finding, note, shown, unusable, warning
from lora_trainer.common.gc_control import gc_disabled
from lora_trainer.config.config import OWN_FOLDER, DataSettings
from lora_trainer.dataset.captions import (
    Metadata,
    Sidecars,
    extension_names,
    read_metadata,
    same_name,
    split_name,
)
from lora_trainer.dataset.dir_entries import (
    Entry,
    UnusedFiles,
    entries_in,
    holds,
    is_inside,
    kind_of,
    text_of,
)
from lora_trainer.dataset.images import IMAGE_EXTENSIONS
from lora_trainer.dataset.masks import MASKS_FOLDER, masked_stem

FOLDER_NAME = "folder name"
MAX_REPEATS = 1000
METADATA_NAME = "metadata.jsonl"
EXCLUDED_FOLDER = "_excluded"
"""What somebody has taken out of a dataset lies in here, under the names it had."""
_REPEATS_FOLDER = re.compile(r"([0-9]+)_(.+)", re.DOTALL)

Group = Literal["picture", "caption", "metadata", "folder", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenCaption:
    """A caption from elsewhere than a file of the image's own; `source` says from where.

    `lines` are those of a list of several.
    """

    text: str
    source: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """An image file before it is opened, its caption file, and stand-ins for that, best first.

    `folder` is the name of the subfolder it lies in, `.` for none. Files are kept as texts: a hundred
    thousand `Path` objects are slow to make and large.
    """

    file: str
    name: str
    folder: str
    repeats: int
    sidecar_file: str | None
    sidecar_name: str | None
    stand_ins: tuple[GivenCaption, ...]
    mask: Path | None = None
    mask_name: str | None = None

    @property
    def path(self) -> Path:
        """Where the image is."""
        return Path(self.file)

    @property
    def sidecar(self) -> Path | None:
        """Where its caption file is, if it has one."""
        return None if self.sidecar_file is None else Path(self.sidecar_file)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files meant as images, by name, and what is odd about the folder."""

    pictures: tuple[ImageFile, ...]
    findings: tuple[Finding, ...]


@gc_disabled()
def list_dataset(root: Path, *, settings: DataSettings) -> Listing:
    """List a dataset folder; raises InputError when there is none, or no image in it."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise InputError(
            f"dataset {shown(str(root))} {what}", fix="give the folder that holds the images"
        )
    walk = _Walk(
        settings=settings,
        caption_extensions=extension_names(settings.caption_extensions),
        real_root=os.path.realpath(root),
    )
    walk.read_root(root)
    left = walk.leftovers()
    findings = [*walk.findings, *left.ignored_files()]
    if not walk.pictures and not any(finding.severity == "error" for finding in findings):
        found = "; ".join(f"{finding.file or ''} {finding.what}".strip() for finding in findings)
        raise InputError(
            f"no images in {shown(str(root))}" + (f" ({found})" if found else ""),
            fix=f"put in files ending in {', '.join(sorted(IMAGE_EXTENSIONS))}",
        )
    pictures = sorted(walk.pictures, key=lambda picture: picture.name)
    return Listing(
        pictures=tuple(pictures),
        findings=(
            *findings,
            *left.shared_captions(),
            *left.unused_captions(),
            *left.unused_masks(),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Folder:
    path: Path
    name: str
    repeats: int
    caption: str | None = None

    @property
    def prefix(self) -> str:
        """What the names of its files begin with."""
        return "" if self.name == OWN_FOLDER else f"{self.name}/"


@dataclass(kw_only=True)
class _Walk:
    """One walk over the folder; collects as it goes."""

    settings: DataSettings
    caption_extensions: tuple[str, ...]
    real_root: str
    pictures: list[ImageFile] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    users: dict[str, list[str]] = field(default_factory=dict)
    """Names of the images each caption file or described name is used by."""
    described: dict[str, GivenCaption] = field(default_factory=dict)
    """What `metadata.jsonl` files say, by the name they give ..."""
    alike: dict[str, str] = field(default_factory=dict)
    """... and that name by its `same_name`."""
    excluded: Path | None = None
    unclaimed_masks: list[tuple[str, str]] = field(default_factory=list)
    """Masks that no image has, by name, each with that of the image it is for, without extension."""

    def read_root(self, root: Path) -> None:
        """Read the folder and those in it."""
        repeats = self.settings.of_folder(OWN_FOLDER).repeats
        named = {OWN_FOLDER}
        for entry in self._read(_Folder(path=root, name=OWN_FOLDER, repeats=repeats)):
            if entry.name.casefold() == EXCLUDED_FOLDER:
                what, advice = "is not read", "move files out of it to train on them"
                self.findings.append(note("excluded", f"{entry.name}/", what, advice=advice))
                self.excluded = Path(entry.path)
                continue
            folder = self._subfolder(entry)
            named.add(folder.name)
            if entry.is_symlink() and is_inside(self.real_root, os.path.realpath(entry.path)):
                what = "is not read, it is a link to the dataset folder itself"
                self.findings.append(_odd_link(folder.prefix, what, advice="remove it"))
                continue
            known = len(self.pictures)
            for deeper in self._read(folder):
                what, advice = "is not read, it lies two folders deep", "move its images up"
                name = folder.prefix + text_of(deeper.name)
                self.findings.append(warning("deep-folder", name, what, advice=advice))
            if count := len(self.pictures) - known:
                what = f"its images ({count}) are seen {folder.repeats} times per epoch"
                advice = "name a folder N_name for N repeats"
                self.findings.append(note("subfolder", folder.prefix, what, advice=advice))
        _refuse_unknown(self.settings, named)

    def _subfolder(self, entry: Entry) -> _Folder:
        match, name = _REPEATS_FOLDER.fullmatch(entry.name), text_of(entry.name)
        own = self.settings.folders.get(name)
        repeats = int(match[1]) if match else self.settings.repeats
        if own is not None and own.repeats is not None:
            repeats = own.repeats
        if not 1 <= repeats <= MAX_REPEATS:
            raise InputError(
                f"folder {shown(entry.name)} means {repeats} repeats, allowed: 1 to {MAX_REPEATS}",
                fix="rename it; a number and _ at the start of a folder's name mean repeats",
            )
        return _Folder(
            path=Path(entry.path),
            name=name,
            repeats=repeats,
            caption=text_of(match[2]) if match else None,
        )

    def _read(self, folder: _Folder) -> list[Entry]:
        """Add what one folder holds; return its subfolders."""
        groups: dict[Group, list[Entry]] = defaultdict(list)
        for entry in entries_in(folder.path):
            group = self._group(entry)
            if self._is_usable(entry, group, folder.prefix + text_of(entry.name)):
                groups[group].append(entry)
        self.ignored.update(
            split_name(entry.name)[1] or "without extension" for entry in groups["other"]
        )
        for entry in groups["metadata"]:
            self._read_metadata(Path(entry.path), folder.prefix)
        names = [entry.name for entry in groups["caption"]]
        self.users.update((folder.prefix + text_of(name), []) for name in names)
        sidecars = Sidecars(names, extensions=self.settings.caption_extensions)
        masks = self._take_masks(folder, groups)
        for entry in groups["picture"]:
            self._add_picture(entry.name, folder, sidecars, masks)
        used = {same_name(split_name(entry.name)[0]) for entry in groups["picture"]}
        if self.settings.masks != "files":
            used.clear()
        self.unclaimed_masks += [
            (name, folder.prefix + stem) for stem, (_, name) in masks.items() if stem not in used
        ]
        return groups["folder"]

    def _take_masks(
        self, folder: _Folder, groups: dict[Group, list[Entry]]
    ) -> dict[str, tuple[Path, str]]:
        """Take the masks of a folder's images out of its groups; return them by `same_name` of the stem.

        A folder of masks is one only if masks are asked for, or if one of its files is named as an image.
        """
        stems = {entry.name: masked_stem(entry.name) for entry in groups["picture"]}
        found = {
            same_name(stem): (folder.path / name, folder.prefix + text_of(name))
            for name, stem in stems.items()
            if stem is not None
        }
        groups["picture"] = [entry for entry in groups["picture"] if stems[entry.name] is None]
        pictures = {same_name(split_name(entry.name)[0]) for entry in groups["picture"]}
        for inner in [one for one in groups["folder"] if one.name.casefold() == MASKS_FOLDER]:
            prefix = f"{folder.prefix}{text_of(inner.name)}/"
            inside: dict[str, tuple[Path, str]] = {}
            for entry in entries_in(Path(inner.path)):
                name = prefix + text_of(entry.name)
                if self._group(entry) == "picture" and self._is_usable(entry, "picture", name):
                    stem = masked_stem(entry.name) or split_name(entry.name)[0]
                    inside[same_name(stem)] = (Path(entry.path), name)
            if self.settings.masks == "files" or pictures & inside.keys():
                groups["folder"].remove(inner)
                found = inside | found
        return found

    def _group(self, entry: Entry) -> Group:
        _, extension = split_name(entry.name)
        if extension in IMAGE_EXTENSIONS:
            return "picture"
        if holds(entry.is_dir):
            return "folder"
        if entry.name == METADATA_NAME:
            return "metadata"
        return "caption" if extension in self.caption_extensions else "other"

    def _is_usable(self, entry: Entry, group: Group, name: str) -> bool:
        """Say whether an entry is what its name says; report if not, or if it lies elsewhere."""
        if group == "other":
            return True
        if group != "folder" and not holds(entry.is_file):
            what = f"is {kind_of(entry)}, not a regular file"
            if group == "picture":
                self.findings.append(unusable(name, what, advice="remove it", code="IMG-09"))
            else:
                self.findings.append(_odd_link(name, what, advice="remove it"))
            return False
        if entry.is_symlink() and not is_inside(entry.path, self.real_root):
            what, advice = "is a link out of the dataset folder", "keep its target in place"
            self.findings.append(note("outside-link", name, what, advice=advice, code="IMG-09"))
        return True

    def _read_metadata(self, path: Path, prefix: str) -> None:
        source = prefix + METADATA_NAME
        try:
            found = read_metadata(path.read_bytes())
        except OSError as error:
            found = Metadata(captions={}, problems=(f"cannot be read ({error.strerror or error})",))
        for problem in found.problems:
            advice = 'write one {"file_name": "...", "text": "..."} a line'
            finding = warning("metadata", source, problem, advice=advice, code="CAP-02")
            self.findings.append(finding)
        for name, text in found.captions.items():
            given = GivenCaption(text=text.text, lines=text.lines, source=source)
            self.described[prefix + name] = given
            self.alike[same_name(prefix + name)] = prefix + name
            self.users[prefix + name] = []

    def _add_picture(
        self,
        file_name: str,
        folder: _Folder,
        sidecars: Sidecars,
        masks: Mapping[str, tuple[Path, str]],
    ) -> None:
        name, place = folder.prefix + text_of(file_name), str(folder.path)
        stand_ins = []
        if self.described:
            described = name if name in self.described else self.alike.get(same_name(name))
            if described is not None:
                self.users[described].append(name)
                stand_ins.append(self.described[described])
        if folder.caption is not None:
            stand_ins.append(GivenCaption(text=folder.caption, source=FOLDER_NAME))
        sidecar = sidecars.find(split_name(file_name)[0])
        sidecar_name = None if sidecar is None else folder.prefix + text_of(sidecar)
        if sidecar_name is not None:
            self.users[sidecar_name].append(name)
        mask, mask_name = None, None
        if self.settings.masks == "files":
            mask, mask_name = masks.get(same_name(split_name(file_name)[0]), (None, None))
        self.pictures.append(
            ImageFile(
                file=os.path.join(place, file_name),  # noqa: PTH118 - a Path per image is slow
                name=name,
                folder=folder.name,
                repeats=folder.repeats,
                sidecar_file=None if sidecar is None else os.path.join(place, sidecar),  # noqa: PTH118 - as above
                sidecar_name=sidecar_name,
                stand_ins=tuple(stand_ins),
                mask=mask,
                mask_name=mask_name,
            )
        )

    def leftovers(self) -> UnusedFiles:
        """Return what of the folder was not taken."""
        return UnusedFiles(
            settings=self.settings,
            ignored=self.ignored,
            users=self.users,
            pictures=frozenset(same_name(split_name(one.name)[0]) for one in self.pictures),
            described=self.described,
            unclaimed_masks=self.unclaimed_masks,
            excluded=self.excluded,
        )


def _refuse_unknown(settings: DataSettings, folders: Collection[str]) -> None:
    unknown = [
        f"data.folders names {shown(name)!r}, which is no subfolder.{did_you_mean(name, folders)}"
        for name in settings.folders
        if name not in folders
    ]
    if unknown:
        raise RequestError(
            " ".join(unknown), fix="name the folders as they are called, the dataset's own `.`"
        )


def _odd_link(name: str, what: str, *, advice: str) -> Finding:
    return warning("not-a-file", name, what, advice=advice, code="IMG-09")
