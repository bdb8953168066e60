"""The contents of a dataset folder, from directory entries alone: images, their captions and masks, unused files.

The folder itself, `N_name` folders (N repeats, "name" where there is no caption) and plain subfolders are read,
two levels deep. `_excluded` is not read; masks, control images and images of the class are not images to learn.
Only regular files are listed, so that no later read blocks on a pipe; the only files opened here are tables of
captions.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from lora_trainer.common.errors import InputError, RequestError, did_you_mean
from lora_trainer.common.events import Finding, named, shown
from lora_trainer.common.files import user_path
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.inputs import OWN_FOLDER, DataSettings
from lora_trainer.dataset.captions import (
    FILE_NAME,
    FOLDER_NAME,
    JSON_SIDECAR,
    NAMES,
    TABLE_NAMES,
    CaptionTables,
    CaptionText,
    Table,
    caption_of_name,
    extension_names,
    read_caption_file,
    read_table,
    same_name,
    split_name,
)
from lora_trainer.dataset.crops import CROPS_FILE, Crop, read_crops
from lora_trainer.dataset.images import IMAGE_EXTENSIONS
from lora_trainer.dataset.mask_names import MASK_SUFFIX, by_name, key_of_mask, masked_folder
from lora_trainer.dataset.records import MAX_REPEATS, finding, finding_of_all
from lora_trainer.dataset.reference_files import (
    ReferenceFile,
    ReferenceFolder,
    images_of,
    is_own_name,
    matched,
    place_in,
    reference_folder,
    starts_and_ends,
)

Entry = os.DirEntry[str]
FolderKind = Literal["mask", "control", "class"]
# End of the name of a control image beside its image, as OneTrainer has it.
CONTROL_SUFFIX = "-condlabel"


def folder_kind(name: str) -> FolderKind | None:
    """Return the kind of images that a folder holds by its name; None: images to learn."""
    folded = name.casefold()
    return next(
        (kind for kind, names in NAMES["folder_kinds"].items() if re.fullmatch(names, folded)), None
    )


def entries_in(path: Path | str) -> list[Entry]:
    """Return a folder's entries by name, without system files and documents; raises InputError."""
    try:
        with os.scandir(path) as entries:
            listed = [entry for entry in entries if _is_meant(entry.name)]
    except OSError as error:
        what = f"cannot read folder {shown(str(path))} ({error.strerror or error})"
        raise InputError(what, fix="make it readable or move it away") from None
    return sorted(listed, key=lambda entry: entry.name)


def _is_meant(name: str) -> bool:
    folded = name.casefold()
    stem, extension = split_name(folded)
    is_document = stem in NAMES["document_stems"] and extension not in IMAGE_EXTENSIONS
    return not (name.startswith(".") or folded in NAMES["ignored_names"] or is_document)


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


# Levels of subfolders that are read, as `img/10_name` of a project of kohya_ss needs.
MAX_DEPTH = 2
# Folder with the images in a project of kohya_ss; `reg`, `log` and `model` lie beside it.
PROJECT_FOLDER = "img"
# What somebody has taken out of a dataset lies in here, under the names it had.
EXCLUDED_FOLDER = "_excluded"
_REPEATS_FOLDER = re.compile(r"([0-9]+)_(.+)", re.DOTALL)

# Files of unknown kinds that are opened to see whether they are images: a folder may hold a million.
MAX_SNIFFED = 1000

Group = Literal["picture", "caption", "metadata", "folder", "other"]


class _File(NamedTuple):
    """An entry of a folder: its name in the dataset, its own name without the extension, and that."""

    entry: Entry
    name: str
    stem: str
    extension: str


Groups = dict[Group, list[_File]]
# Files of masks, by `same_name` of the stem of the image.
Masks = dict[str, _File]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """An image file before it is opened, with its caption file and other captions that could take its place.

    Files are texts: 100,000 `Path` objects are slow to make and large.
    """

    file: str
    name: str
    folder: str
    """Its subfolder; `.` for none."""
    repeats: int
    sidecar_file: str | None
    sidecar_name: str | None
    stand_ins: tuple[CaptionText, ...]
    """Captions to use without a caption file, best first."""
    mask: Path | None = None
    mask_name: str | None = None
    references: tuple[ReferenceFile, ...] = ()
    """Its reference images, the first one first."""
    crop: Crop | None = None
    """The part of it that is trained; None: the whole image."""

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
    """The image files by name, and findings about the folder."""

    pictures: tuple[ImageFile, ...]
    findings: tuple[Finding, ...]


@gc_disabled()
def list_dataset(root: Path, *, settings: DataSettings) -> Listing:
    """List a dataset folder; raises InputError when there is none, or no image in it."""
    give = "give the folder that holds the images"
    if not root.exists():
        raise InputError(f"dataset {shown(str(root))} does not exist", fix=give)
    if not root.is_dir():
        raise InputError(f"dataset {shown(str(root))} is not a folder", fix=give)
    walk = _Walk(
        settings=settings,
        caption_extensions=(*extension_names(settings.caption_extensions), JSON_SIDECAR),
        root=os.path.normpath(root),
        reference_dirs=frozenset(
            os.path.realpath(user_path(given)) for given in settings.reference_dirs
        ),
        real_root=os.path.realpath(root),
    )
    repeats = settings.of_folder(OWN_FOLDER).repeats
    # `10_cat` itself has the words that its images have where it lies in the dataset. Its repeats would count for
    # all images alike, and a year (`2024_summer`) is not a number of repeats.
    match = _REPEATS_FOLDER.fullmatch(root.resolve().name)
    caption = text_of(match[2]) if match and 1 <= int(match[1]) <= MAX_REPEATS else None
    walk.read(_Folder(path=root, name=OWN_FOLDER, repeats=repeats, caption=caption), {})
    unknown = [
        f"data.folders names {shown(name)!r}, which is not a subfolder."
        f"{did_you_mean(name, walk.folder_names)}"
        for name in settings.folders
        if name not in walk.folder_names
    ]
    if unknown:
        raise RequestError(
            " ".join(unknown), fix="use the names of the folders; the dataset folder itself is `.`"
        )
    findings = walk.findings
    findings += finding_of_all("unread-images", walk.unread_images)
    if walk.ignored:
        rows = sorted(walk.ignored.items())
        counts = ", ".join(f"{count} {suffix}" for suffix, count in rows)
        advice = (text for suffix, text in NAMES["advice"].items() if suffix in walk.ignored)
        words = {"counts": counts, "advice": next(advice, "nothing to do")}
        findings.append(finding("ignored-files", **words))
    if not walk.pictures and not any(one.severity == "error" for one in findings):
        remarks = "; ".join(f"{one.file or ''} {one.what}".strip() for one in findings)
        raise InputError(
            f"no images in {shown(str(root))}" + (f" ({remarks})" if remarks else ""),
            fix=f"put in files ending in {', '.join(sorted(IMAGE_EXTENSIONS))}",
        )
    pictures = sorted(walk.with_references(), key=lambda picture: picture.name)
    findings += [
        *walk.findings_about_captions(),
        *walk.unused_masks(),
        *walk.findings_about_crops(),
    ]
    return Listing(pictures=tuple(pictures), findings=tuple(findings))


@dataclass(frozen=True, kw_only=True)
class _Folder:
    path: Path
    name: str
    repeats: int
    caption: str | None = None
    mirrors: tuple[_File, ...] = ()
    """Folders of masks for its images that lie in the same place below a folder of masks."""

    @property
    def prefix(self) -> str:
        """The prefix of its files' names in the dataset."""
        return "" if self.name == OWN_FOLDER else f"{self.name}/"


@dataclass(kw_only=True)
class _Walk:
    """One walk over the folder; collects as it goes."""

    settings: DataSettings
    caption_extensions: tuple[str, ...]
    root: str
    real_root: str
    reference_dirs: frozenset[str]
    """The folders that `data.reference_dirs` names, links followed."""
    pictures: list[ImageFile] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    unread_images: list[str] = field(default_factory=list)
    """Files whose first bytes are those of an image and whose names are not."""
    sniffed: int = 0
    users: dict[str, list[str]] = field(default_factory=dict)
    """Names of the images each caption file or described name is used by."""
    tables: CaptionTables = field(default_factory=CaptionTables)
    taken_out: set[str] = field(default_factory=set)
    """The names that images had before they were taken out of the dataset, without extension, by `same_name`."""
    second_captions: list[tuple[str, str, str]] = field(default_factory=list)
    """Images with two caption files: the image, the file that counts, the file that does not."""
    masks: list[tuple[str, str]] = field(default_factory=list)
    """Masks by name, each with the name of the image it is for, without extension."""
    folder_names: set[str] = field(default_factory=lambda: {OWN_FOLDER})
    reference_folders: list[ReferenceFolder] = field(default_factory=list)
    named_references: dict[str, tuple[ReferenceFile, ...]] = field(default_factory=dict)
    """References that a table or the names of one folder's files give, by the name of the image."""
    references_of_rows: dict[str, tuple[ReferenceFile, ...]] = field(default_factory=dict)
    """References that the rows of tables name, by the key of the row."""
    reference_paths: set[str] = field(default_factory=set)
    """Files that a table names as references and not as images to learn."""
    unused_references: list[str] = field(default_factory=list)
    lost_references: list[str] = field(default_factory=list)
    """References that a table names and that are not there."""
    crops: dict[str, Crop] = field(default_factory=dict)
    """The parts of images that are trained, by the names of the images."""

    def _say(self, name: str, file: str, /, **words: object) -> None:
        self.findings.append(finding(name, file, **words))

    def read(self, folder: _Folder, masks_beside: Masks) -> None:
        """Read a folder and its subfolders, down to `MAX_DEPTH`."""
        count_before = len(self.pictures)
        files, masks, mask_folders = self._read_files(folder, masks_beside)
        count = len(self.pictures) - count_before
        if count and folder.name != OWN_FOLDER:
            self._say("subfolder", folder.prefix, count=count, repeats=folder.repeats)
        depth = 0 if folder.name == OWN_FOLDER else folder.name.count("/") + 1
        if depth == MAX_DEPTH:
            for below in files:
                self._say("deep-folder", below.name, depth=MAX_DEPTH + 1)
            return
        # A project of kohya_ss: no images, and `N_name` folders in its `img`.
        img = [one.entry.path for one in files if one.entry.name.casefold() == PROJECT_FOLDER]
        is_project = not self.pictures and any(
            _REPEATS_FOLDER.fullmatch(inner.name) for path in img for inner in entries_in(path)
        )
        # Folders of references last: whether they hold any, the names of the images say.
        for file in sorted(files, key=lambda file: place_in(file.entry.name) is not None):
            if self._takes_references(file, folder):
                continue
            last, names = file.name.rpartition("/")[2], self.settings.folders
            kind: str | None = folder_kind(last)
            if kind not in ("control", "class"):
                is_beside = is_project and last.casefold() != PROJECT_FOLDER
                kind = "project" if is_beside else None
                # `isfile` answers False where a folder may not be entered.
                files_of_run = (
                    f"{file.entry.path}/{name}" for name in ("run.json", "events.jsonl")
                )
                if all(map(os.path.isfile, files_of_run)):
                    kind = "run"
            # A folder that `data.folders` names is read, whatever its name.
            if kind and not any(f"{name}/".startswith(f"{file.name}/") for name in names):
                self._say(
                    f"aside-folder.{kind}", f"{file.name}/", name=file.name, project=PROJECT_FOLDER
                )
                continue
            match = _REPEATS_FOLDER.fullmatch(file.entry.name)
            outer = self.settings.repeats if depth == 0 else folder.repeats
            repeats = int(match[1]) if match else outer
            in_folder = self.settings.folders.get(file.name)
            if in_folder and in_folder.repeats is not None:
                repeats = in_folder.repeats
            if not 1 <= repeats <= MAX_REPEATS:
                name = shown(file.entry.name)
                raise InputError(
                    f"folder {name} means {repeats} repeats, allowed: 1 to {MAX_REPEATS}",
                    fix="rename it; a number and _ at the start of a folder's name mean repeats",
                )
            inner = _Folder(
                path=Path(file.entry.path),
                name=file.name,
                repeats=repeats,
                caption=text_of(match[2]) if match else folder.caption,
                mirrors=subfolders_called(file.entry.name, *mask_folders, *folder.mirrors),
            )
            self.folder_names.add(inner.name)
            real_path = os.path.realpath(file.entry.path)
            if file.entry.is_symlink() and is_inside(self.real_root, real_path):
                self._say("not-a-file.own-folder", inner.prefix)
                continue
            self.read(inner, masks)

    def _takes_references(self, file: _File, folder: _Folder) -> bool:
        """Take out a subfolder whose files have the names of images, as their references; return whether it is one."""
        place = place_in(file.entry.name)
        is_named = any(f"{name}/".startswith(f"{file.name}/") for name in self.settings.folders)
        if os.path.realpath(file.entry.path) in self.reference_dirs:
            return True  # `with_references` reads it
        if place is None or is_named:
            return False
        found = reference_folder(file.entry.path, name=file.name, beside=folder.prefix, place=place)
        if any(one.file in self.reference_paths for one in found.files.values()):
            return True  # a table said which images they are for
        if not matched((picture.name for picture in self.pictures), [found])[0]:
            return False
        if self.settings.references == "files":
            self.reference_folders.append(found)
            return True
        if is_own_name(file.entry.name):
            self._say("unread-references", f"{file.name}/")
            return True
        return False  # set aside by its name, as without the setting

    def with_references(self) -> list[ImageFile]:
        """Return the images with their reference images, and say which references and images have no partner."""
        folders = self.reference_folders
        if self.settings.references == "files":
            for number, given in enumerate(self.settings.reference_dirs, 1):
                path = Path(user_path(given))
                if not path.is_dir():
                    raise InputError(
                        f"data.reference_dirs names {shown(str(path))}, which is not a folder",
                        fix="give folders of reference images, whose files have the names of the images",
                    )
                # Behind those in the dataset folder, for images of the whole dataset.
                folders = [
                    *folders,
                    reference_folder(str(path), name=str(path), beside="", place=100 + number),
                ]
            lost = sorted(set(self.lost_references))
            self.findings += finding_of_all("references.lost", lost)
        if self.settings.references == "none" or not (folders or self.named_references):
            return self.pictures
        others = (one.name for one in self.pictures if one.name not in self.named_references)
        in_folders, unused = matched(others, folders)
        references = {**in_folders, **self.named_references}
        alone = [one.name for one in self.pictures if one.name not in references]
        words = {"pairs": len(references), "images": len(self.pictures)}
        for folder in sorted(folders, key=lambda folder: (folder.place, folder.name)):
            self._say("references", folder.name + "/", **words)
        unused += self.unused_references
        # Those of an image that was taken out wait for it.
        unused = [name for name in unused if self.taken_out.isdisjoint(images_of(name))]
        self.findings += finding_of_all("references.unused", sorted(unused))
        self.findings += finding_of_all("references.missing", sorted(alone))
        return [
            replace(picture, references=references.get(picture.name, ()))
            for picture in self.pictures
        ]

    def _read_files(
        self, folder: _Folder, masks_beside: Masks
    ) -> tuple[list[_File], Masks, list[_File]]:
        """Add the files of one folder; return its subfolders, masks of their images, and its folders of masks.

        `masks_beside`: masks in a folder beside this one.
        """
        groups: Groups = defaultdict(list)
        for file in _files(folder.path, folder.prefix):
            group = self._group(file)
            if self._is_usable(file, group):
                if group == "folder" and file.name.casefold() == EXCLUDED_FOLDER:
                    self._say("excluded", f"{file.name}/")
                    root = Path(file.entry.path)
                    paths = (path.relative_to(root).as_posix() for path in root.rglob("*"))
                    self.taken_out |= {
                        same_name(stem)
                        for stem, extension in map(split_name, paths)
                        if extension in IMAGE_EXTENSIONS
                    }
                else:
                    groups[group].append(file)
        own_masks, inner_masks, mask_folders = self._take_masks(folder, groups)
        masks = masks_beside | own_masks
        # OneTrainer's control images, `NAME-condlabel.png` beside `NAME.png`, are not images to learn.
        controlled = {file.stem + CONTROL_SUFFIX for file in groups["picture"]}
        control = [file.name for file in groups["picture"] if file.stem in controlled]
        groups["picture"] = [file for file in groups["picture"] if file.stem not in controlled]
        self.findings += finding_of_all("control-images", control)
        stems = {file.stem for file in groups["picture"]}
        images = stems | {file.entry.name for file in groups["picture"]}
        # The caption file of an image that happens to be called `captions.png` is not a table.
        tables = [file for file in groups["metadata"] if file.stem not in stems]
        for file in sorted(tables, key=lambda one: TABLE_NAMES.index(one.entry.name.casefold())):
            try:
                data = Path(file.entry.path).read_bytes()
                table = read_table(file.entry.name.casefold(), data)
            except OSError as error:
                table = Table(problems=(f"cannot be read ({error.strerror or error})",))
            for problem in table.problems:
                self._say("metadata", file.name, problem=problem)
            new = self.tables.add(table, source=file.name, folder=folder.path, prefix=folder.prefix)
            self.users.update((key, []) for key in new)
            self._find_references_of_rows(table, frozenset(new), file, folder)
        self._take_crops(folder, groups, stems)
        captions = [file for file in groups["metadata"] if file not in tables]
        for file in groups["caption"]:
            # Many tools leave JSON files in a folder; only one named as an image can be its caption.
            is_caption = file.extension != JSON_SIDECAR or file.stem in images
            (captions if is_caption else groups["other"]).append(file)
        unread = [file for file in groups["other"] if self._is_an_image(file)]
        self.unread_images += [file.name for file in unread]
        rest = [file for file in groups["other"] if file not in unread]
        self.ignored.update(file.extension or "without extension" for file in rest)
        self.users.update((file.name, []) for file in captions)
        groups["picture"] = [
            file for file in groups["picture"] if file.entry.path not in self.reference_paths
        ]
        captions_of = _by_picture(captions, self.caption_extensions)
        roots = self._take_starts(folder, groups)
        for file in groups["picture"]:
            own = captions_of(file)
            if not own and file.name in roots:
                own = captions_of(file._replace(stem=roots[file.name]))
            self._add_picture(file, folder, own, masks)
        return groups["folder"], inner_masks, mask_folders

    def _take_crops(self, folder: _Folder, groups: Groups, stems: set[str]) -> None:
        """Read the file of crops in the dataset folder itself; raises InputError for one that cannot be read."""
        for file in [*groups["caption"], *groups["other"]]:
            # The caption file of an image that happens to be called `crops.png` is not one of crops.
            if file.name != CROPS_FILE or folder.name != OWN_FOLDER or file.stem in stems:
                continue
            try:
                self.crops = read_crops(Path(file.entry.path).read_bytes())
            except (OSError, ValueError) as error:
                raise InputError(
                    f"{shown(file.entry.path)} cannot be read: {error}",
                    fix="mend it, or remove it to train whole images",
                ) from None
            for kind in ("caption", "other"):
                groups[kind] = [one for one in groups[kind] if one is not file]

    def findings_about_crops(self) -> Iterator[Finding]:
        """Yield how many images are trained in part, and crops of images that are not there."""
        names = {picture.name for picture in self.pictures}
        yield from finding_of_all("crops", sorted(names & self.crops.keys()))
        unused = (
            name
            for name in self.crops.keys() - names
            if same_name(split_name(name)[0]) not in self.taken_out
        )
        yield from finding_of_all("crops.unused", sorted(unused))

    def _find_references_of_rows(
        self, table: Table, keys: frozenset[str], file: _File, folder: _Folder
    ) -> None:
        """Find the reference images that the rows of a table name; `keys` are those of its rows that count."""
        found: dict[str, ReferenceFile] = {}
        for image, names in table.references.items():
            if folder.prefix + image not in keys:
                continue
            for name in names:
                if name not in found and (one := self._file_named(name, folder)):
                    found[name] = one
            self.lost_references += [name for name in names if name not in found]
            self.references_of_rows[folder.prefix + image] = tuple(
                found[name] for name in names if name in found
            )
        # One that has a row of its own is an image to learn too.
        self.reference_paths |= {
            one.file for one in found.values() if self.tables.find(one.name) is None
        }
        if found:
            self._say_of_pairs("named", file.name)

    def _file_named(self, name: str, folder: _Folder) -> ReferenceFile | None:
        """Return the image file that a table in `folder` names, by its end if the path is one of another machine."""
        parts = PurePosixPath(name).parts
        for index in range(len(parts)):
            path = os.path.normpath(folder.path.joinpath(*parts[index:]))
            is_image = split_name(path)[1] in IMAGE_EXTENSIONS and Path(path).is_file()
            if is_image and is_inside(path, self.real_root):
                inner = Path(os.path.relpath(path, self.root)).as_posix()
                return ReferenceFile(path, text_of(inner))
        return None

    def _say_of_pairs(self, layout: str, file: str) -> None:
        """Say in which layout pairs were recognised, or that their references are not read."""
        is_read = self.settings.references == "files"
        self._say(f"references.{layout}" if is_read else "unread-references", file)

    def _take_starts(self, folder: _Folder, groups: Groups) -> dict[str, str]:
        """Remove the references among files called `NAME_start` and `NAME_end`; return NAME by the image's name."""
        files = {file.name: file for file in groups["picture"]}
        found = starts_and_ends(files)
        if found is None:
            return {}
        groups["picture"] = [
            file for file in groups["picture"] if file.name not in found.references
        ]
        self.named_references |= {
            image: tuple(ReferenceFile(files[name].entry.path, name) for name in names)
            for image, names in found.starts.items()
            if names
        }
        self.unused_references += found.alone
        self._say_of_pairs("beside", folder.prefix or OWN_FOLDER)
        return {name: files[name].stem[: -len("_end")] for name in found.starts}

    def _take_masks(self, folder: _Folder, groups: Groups) -> tuple[Masks, Masks, list[_File]]:
        """Remove mask files from a folder's groups; return the masks of its images and of its subfolders' images.

        Masks of a subfolder's images are in a folder beside the subfolder (`images/a.png`, `masks/a.png`), or in
        one of the subfolder's name inside of it (`10_cat/a.png`, `masks/10_cat/a.png`); the folders of masks are
        returned too. A folder called `masks` may also hold images of masks to learn: it holds masks only if masks
        are asked for, or if one of its files has the name of an image.
        """
        beside = self._masks_beside(folder, groups)
        own_masks = {key: mask for key, mask in reversed(beside)}
        self.masks += [
            (mask.name, folder.prefix + key) for key, mask in beside if own_masks[key] is not mask
        ]
        taken = {mask.name for _, mask in beside}
        groups["picture"] = [file for file in groups["picture"] if file.name not in taken]
        own_images = by_name(file.entry.name for file in groups["picture"])
        names = {one.entry.name.casefold() for one in groups["folder"]}
        mask_folders = [
            one
            for one in groups["folder"]
            if folder_kind(one.entry.name) == "mask"
            or (masked_folder(one.entry.name) or "").casefold() in names
        ]
        others = [
            one
            for one in groups["folder"]
            if one not in mask_folders and one.entry.name.casefold() != EXCLUDED_FOLDER
        ]
        inner_images = by_name(
            file.entry.name
            for one in others
            if mask_folders
            for file in _files(one.entry.path, "")
            if self._group(file) == "picture"
        )
        for mirror in folder.mirrors:
            own_masks = self._masks_in(mirror, own_images) | own_masks
        inner_masks: Masks = {}
        taken_folders = list[_File]()
        for inner in mask_folders:
            is_asked_for = self.settings.masks == "files" and folder_kind(inner.entry.name)
            inside = self._masks_in(inner, {**inner_images, **own_images})
            if own_images.keys() & inside.keys() or (own_images and is_asked_for):
                own_masks = inside | own_masks
            elif inner_images.keys() & inside.keys() or (others and is_asked_for):
                inner_masks |= inside
                self.masks += [(file.name, folder.prefix + stem) for stem, file in inside.items()]
            elif not self._is_mirror(inner, others):
                continue
            groups["folder"].remove(inner)
            taken_folders.append(inner)
        self.masks += [(file.name, folder.prefix + stem) for stem, file in own_masks.items()]
        return own_masks, inner_masks, taken_folders

    def _masks_in(self, folder: _File, images: Mapping[str, str]) -> Masks:
        """Return the masks in a folder of masks by the image that they are of."""
        files = _files(folder.entry.path, f"{folder.name}/")
        return _by_image(
            (
                file
                for file in files
                if self._group(file) == "picture" and self._is_usable(file, "picture")
            ),
            images,
        )

    def _is_mirror(self, mask_folder: _File, folders: Sequence[_File]) -> bool:
        """Say whether a subfolder of a folder of masks has the name of one beside it, and a file that of an image."""
        for inner in folders:
            pictures = [
                [
                    file.entry.name
                    for file in _files(one.entry.path, "")
                    if self._group(file) == "picture"
                ]
                for one in (inner, *subfolders_called(inner.entry.name, mask_folder))
            ]
            images = by_name(pictures[0])
            masks = (split_name(name)[0] for names in pictures[1:] for name in names)
            if any(
                key_of_mask(stem, images, in_mask_folder=True) in images.values() for stem in masks
            ):
                return True
        return False

    def _masks_beside(self, folder: _Folder, groups: Groups) -> list[tuple[str, _File]]:
        """Return the masks among the pictures of a folder and which image each is of, which may be taken out.

        Of several masks of an image the first counts: the one with the name that is written here.

        A picture with a caption of its own is an image to learn, unless its name is the one that is written here.
        """
        captioned = {file.stem for file in groups["caption"]}
        images = by_name(file.entry.name for file in groups["picture"])
        prefix = same_name(folder.prefix)
        taken_out = {
            name.removeprefix(prefix) for name in self.taken_out if name.startswith(prefix)
        }
        images = {name: name for name in taken_out} | images
        masks = []
        for file in groups["picture"]:
            if file.stem.endswith(MASK_SUFFIX) or not {file.stem, file.entry.name} & captioned:
                key = key_of_mask(file.stem, images, in_mask_folder=False)
                masks += [] if key is None else [(key, file)]
        return sorted(masks, key=lambda pair: not pair[1].stem.endswith(MASK_SUFFIX))

    def _group(self, file: _File) -> Group:
        if file.extension in IMAGE_EXTENSIONS:
            return "picture"
        if holds(file.entry.is_dir):
            return "folder"
        if file.entry.name.casefold() in TABLE_NAMES:
            return "metadata"
        return "caption" if file.extension in self.caption_extensions else "other"

    def _is_usable(self, file: _File, group: Group) -> bool:
        """Return whether an entry is the file or folder that its name says; report other kinds and outside links."""
        entry = file.entry
        if group == "other":
            return True
        if group != "folder" and not holds(entry.is_file):
            what = "a folder" if holds(entry.is_dir) else "a pipe, socket or device"
            what = "a link to no file" if entry.is_symlink() else what
            kind = "unusable.not-a-file" if group == "picture" else "not-a-file"
            self._say(kind, file.name, entry=what)
            return False
        if entry.is_symlink() and not is_inside(entry.path, self.real_root):
            self._say("outside-link", file.name)
        return True

    def _is_an_image(self, file: _File) -> bool:
        """Say whether a file of another kind begins as an image does, such as `photo.jpg_large`; asked of a few."""
        if self.sniffed == MAX_SNIFFED or not holds(file.entry.is_file):
            return False
        self.sniffed += 1
        try:
            with Path(file.entry.path).open("rb") as opened:
                head = opened.read(16)
        except OSError:
            return False
        return re.match(NAMES["image_beginnings"], head.decode("latin-1"), re.DOTALL) is not None

    def _add_picture(
        self, file: _File, folder: _Folder, captions: Sequence[_File], masks: Masks
    ) -> None:
        """Add an image with its caption files, the one that counts first."""
        stand_ins = []
        described = self.tables.find(file.name)
        if described is not None:
            self.users[described].append(file.name)
            stand_ins.append(self.tables.captions[described])
            if self.references_of_rows.get(described):
                self.named_references[file.name] = self.references_of_rows[described]
        if self.settings.caption_fallback == "file_name":
            stand_ins.append(CaptionText(caption_of_name(file.name), source=FILE_NAME))
        if folder.caption is not None:
            stand_ins.append(CaptionText(folder.caption, source=FOLDER_NAME))
        for sidecar in captions[:1]:
            self.users[sidecar.name].append(file.name)
        self.second_captions += [
            (file.name, text_of(captions[0].entry.name), text_of(other.entry.name))
            for other in captions[1:]
            if not _are_equal(Path(captions[0].entry.path), Path(other.entry.path))
        ]
        mask = masks.get(same_name(file.stem)) if self.settings.masks == "files" else None
        self.pictures.append(
            ImageFile(
                file=file.entry.path,
                name=file.name,
                folder=folder.name,
                repeats=folder.repeats,
                sidecar_file=captions[0].entry.path if captions else None,
                sidecar_name=captions[0].name if captions else None,
                stand_ins=tuple(stand_ins),
                mask=Path(mask.entry.path) if mask else None,
                mask_name=mask.name if mask else None,
                crop=self.crops.get(file.name),
            )
        )

    def findings_about_captions(self) -> Iterator[Finding]:
        """Yield the caption files that stand for several images, for none, or for one that has another."""
        for source, names in self.users.items():
            if len(names) > 1:
                yield finding("ambiguous-caption", source, count=len(names), names=named(names))
        stems = {same_name(split_name(image.name)[0]) for image in self.pictures}
        unused = []
        for source in (source for source, names in self.users.items() if not names):
            # A caption without a use may have an image: with another caption, or taken out of the dataset.
            images = self.taken_out if source in self.tables.captions else stems
            unused += [] if same_name(split_name(source)[0]) in images else [source]
        yield from finding_of_all("unused-caption", unused)
        second = [*self.second_captions, *self.tables.second]
        rows = [f"{name} ({first}, not {other})" for name, first, other in second]
        yield from finding_of_all("two-captions", rows)

    def unused_masks(self) -> list[Finding]:
        """Return one finding about masks nobody asked for, or that have no image; not of images taken out."""
        used = {image.mask_name for image in self.pictures}
        names = [
            name
            for name, picture in self.masks
            if name not in used and same_name(picture) not in self.taken_out
        ]
        kind = "unused-mask" if self.settings.masks == "files" else "unused-mask.setting"
        return finding_of_all(kind, names)


def _files(path: Path | str, prefix: str) -> Iterator[_File]:
    """Yield the entries of a folder, whose names in the dataset begin with `prefix`."""
    for entry in entries_in(path):
        yield _File(entry, prefix + text_of(entry.name), *split_name(entry.name))


def subfolders_called(name: str, *folders: _File) -> tuple[_File, ...]:
    """Return the subfolders of that name in some folders."""
    return tuple(
        one
        for folder in folders
        for one in _files(folder.entry.path, f"{folder.name}/")
        if one.entry.name.casefold() == name.casefold() and holds(one.entry.is_dir)
    )


def _by_image(masks: Iterable[_File], images: Mapping[str, str]) -> Masks:
    """Return the files of a folder of masks by the image they are of."""
    keys = ((key_of_mask(mask.stem, images, in_mask_folder=True), mask) for mask in masks)
    return {key: mask for key, mask in keys if key is not None}


def _by_picture(
    captions: Iterable[_File], extensions: Sequence[str]
) -> Callable[[_File], list[_File]]:
    """Return a function that finds the caption files of an image by its exact name, else by `same_name`.

    The one that counts comes first: in the order of the extensions, and `NAME.txt` before `NAME.png.txt`.
    """
    exact, similar = dict[str, _File](), dict[str, _File]()
    for file in sorted(captions, key=lambda file: file.entry.name):
        exact.setdefault(file.stem + file.extension, file)
        similar.setdefault(same_name(file.stem) + file.extension, file)

    def captions_of(picture: _File) -> list[_File]:
        bases = (picture.stem, picture.entry.name)
        names = ((base, extension) for extension in extensions for base in bases)
        files = (exact.get(a + b) or similar.get(same_name(a) + b) for a, b in names)
        return [file for file in files if file is not None]

    return captions_of


def _are_equal(first: Path, second: Path) -> bool:
    """Return whether two caption files say the same; a file that cannot be read is reported later."""
    try:
        texts = {read_caption_file(path.name, path.read_bytes()).text for path in (first, second)}
    except OSError:
        return True
    return len(texts) == 1
