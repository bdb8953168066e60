"""The files that a captioning model writes: which images get a caption, where it goes, and the way back.

A caption from a file, from `metadata.jsonl` or from a folder's name counts as one, and is left alone unless it is
asked to be replaced. Beside the captions lies a hidden folder `.captions-before` with a numbered folder for each
call: `journal.jsonl` names every file with the SHA-256 of its new text, `old/` holds the replaced files. It is hidden,
so that training does not take it for a part of the dataset, and it lies in the dataset, so that it is found where
the captions are missed. Files edited since are left alone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, MachineError, RequestError, did_you_mean
from lora_trainer.common.events import read_jsonl, shown
from lora_trainer.common.files import (
    disk_error,
    locked,
    retry_while_open,
    sha256_bytes,
    sync_folder,
    write_atomic,
)
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import is_json, read_caption_file, split_name
from lora_trainer.dataset.crops import Crop
from lora_trainer.dataset.listing import ImageFile, list_dataset

EXTENSION = ".txt"


@dataclass(frozen=True, kw_only=True)
class Target:
    """An image to be captioned, the file for its caption, and that file's bytes now (None: no file)."""

    picture: Path
    crop: Crop | None = None
    """The part of it that is trained; None: the whole image."""
    references: tuple[Path, ...] = ()
    """Of an editing pair: its reference images, the first one first."""
    name: str
    file: Path
    before: bytes | None


@dataclass(kw_only=True)
class Chosen:
    """Images to caption by name, names of those that have one by its source, and images that cannot be captioned."""

    targets: list[Target] = field(default_factory=list)
    captioned: dict[str, str] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, reason and fix."""
    findings: int = 0
    """Files meant as images that are none; `lora-train check` names them."""


def choose(
    dataset: Path, *, overwrite: bool, only: Sequence[str] = (), output: Path | None = None
) -> Chosen:
    """Return which images of `dataset`, or of `only`, get a caption; with `output`, a file there.

    Raises InputError when the folder has no images, RequestError for one in `only` it has not.
    """
    listing = list_dataset(dataset, settings=DataSettings())
    chosen = Chosen(findings=sum(finding.severity == "error" for finding in listing.findings))
    owners: dict[Path, str] = {}
    for picture in _selected(listing.pictures, only, dataset):
        # The file that training reads: the one that the image has, else NAME.txt beside it.
        file = picture.path.with_name(split_name(picture.path.name)[0] + EXTENSION)
        if output is not None:
            file = output / file.relative_to(dataset)
        elif picture.sidecar is not None and not is_json(picture.sidecar.name):
            file = picture.sidecar
        owner = owners.setdefault(file, picture.name)
        before = content_of(file)
        if owner != picture.name:
            problem = f"would share the caption file of {owner}"
            chosen.refused.append((picture.name, problem, "rename one of the two"))
        elif file.is_symlink():
            problem = f"has {file.name}, which is a link to elsewhere"
            fix = "put a file in its place, or use --output"
            chosen.refused.append((picture.name, problem, fix))
        elif not overwrite and (source := _caption_source(picture, file, before)):
            chosen.captioned[picture.name] = source
        else:
            target = Target(
                picture=picture.path,
                crop=picture.crop,
                references=tuple(Path(one.file) for one in picture.references),
                name=picture.name,
                file=file,
                before=before,
            )
            chosen.targets.append(target)
    return chosen


def _selected(
    pictures: Iterable[ImageFile], only: Sequence[str], dataset: Path
) -> Iterator[ImageFile]:
    """Yield the images that were named, as in the dataset or by a path; all where none was."""
    if not only:
        yield from pictures
        return
    by_name = {picture.name: picture for picture in pictures}
    by_path = {os.path.realpath(picture.path): picture for picture in pictures}
    selected_names = set()
    for name in only:
        match = by_name.get(name) or by_path.get(os.path.realpath(name))
        if match is None:
            raise RequestError(
                f"--images {shown(name)} is not an image in {shown(str(dataset))}."
                f"{did_you_mean(name, by_name)}",
                fix="give its name inside the folder",
            )
        selected_names.add(match.name)
    yield from (picture for picture in by_name.values() if picture.name in selected_names)


def content_of(file: Path) -> bytes | None:
    """Return a file's bytes, None where there is no file; raises InputError for a file that cannot be read."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{shown(str(file))} cannot be read ({error.strerror or error})",
            fix="make it readable or move it away",
        ) from None


def _caption_source(picture: ImageFile, file: Path, before: bytes | None) -> str | None:
    """Return where an image's caption comes from, None where it has none; an empty file is none."""
    contents = {file: before or b""}
    if picture.sidecar is not None and picture.sidecar != file:  # with `output`
        contents[picture.sidecar] = content_of(picture.sidecar) or b""
    for path, content in contents.items():
        if read_caption_file(path.name, content).text:
            return path.name
    return next((stand_in.source for stand_in in picture.stand_ins if stand_in.text), None)


FOLDER = ".captions-before"
JOURNAL = "journal.jsonl"
_NUMBERED = re.compile(r"(\d{4,})(-undone)?")


@dataclass(kw_only=True)
class CaptionJournal:
    """The record of one call. It begins with the first caption, so a call that writes no caption leaves no record."""

    root: Path
    folder: Path
    request: dict[str, Any]
    written: dict[str, str] = field(default_factory=dict)
    """SHA-256 by file of the captions it wrote; needed to continue the call."""

    def has_written(self, file: Path, content: bytes | None) -> bool:
        """Say whether this call, interrupted, wrote `content` to `file` before."""
        return content is not None and self.written.get(self._name(file)) == sha256_bytes(content)

    def write(self, file: Path, text: bytes, *, before: bytes | None) -> None:
        """Write a caption file so that it can be taken back; raises MachineError."""
        name, old = self._name(file), None
        if not self.folder.exists():
            try:
                self.folder.mkdir()
                sync_folder(self.folder.parent)
            except OSError as error:
                raise disk_error(self.folder, error) from error
            self._append({"request": self.request})
        if before is not None:  # is stored under the name of the file, or that with a number
            names = (f"{name}.{number}" if number else name for number in itertools.count())
            old = next(one for one in names if not (self.folder / "old" / one).exists())
            _write(self.folder / "old" / old, before)
        self._append({"file": name, "sha256": sha256_bytes(text), "old": old})
        _write(file, text)
        self.written[name] = sha256_bytes(text)

    def finish(self) -> None:
        """Note that the call did all it was asked for: the next one is one of its own."""
        if self.written:
            self._append({"finished": True})

    def _append(self, row: Mapping[str, Any]) -> None:
        file = self.folder / JOURNAL
        try:
            with file.open("a", encoding="ascii", newline="\n") as stream:
                # The first line break ends a last line that a kill cut. Escaped to ASCII: a file name may hold
                # bytes that are not UTF-8.
                stream.write(f"\n{json.dumps(row)}\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise disk_error(file, error) from error

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def _write(file: Path, content: bytes) -> None:
    """Write a file and its folder; raises MachineError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error
    write_atomic(file, content)


@contextmanager
def opened(root: Path, request: Mapping[str, Any]) -> Iterator[CaptionJournal]:
    """Begin a record in `root`, or go on with the last one if that was the same request, interrupted.

    Raises MachineError when the folder cannot be written or another process captions it.
    """
    with _locked(root) as parent:
        last = _last_call(parent)
        rows = read_jsonl(last / JOURNAL) if last is not None else []
        if last and rows[:1] == [{"request": dict(request)}] and {"finished": True} not in rows:
            written = {str(row["file"]): str(row["sha256"]) for row in rows if "file" in row}
            folder = last
        else:
            written, folder = {}, parent / f"{max(_calls(parent), default=0) + 1:04d}"
        yield CaptionJournal(root=root, folder=folder, request=dict(request), written=written)


def undo(root: Path) -> dict[str, list[str]]:
    """Take back the last call that wrote captions in `root`; the record stays, marked as undone.

    Returns the names of the files that were `removed`, `restored`, or left alone as they were `edited` since.
    Raises InputError when there is none, MachineError when the disk refuses.
    """
    no_call = InputError(f"{root} has no captions to take back", fix="check the folder")
    if not (root / FOLDER).is_dir():
        raise no_call
    with _locked(root) as parent:
        last = _last_call(parent)
        if last is None:
            raise no_call
        files_by_outcome: dict[str, list[str]] = {"removed": [], "restored": [], "edited": []}
        for row in reversed(read_jsonl(last / JOURNAL)):
            if "file" in row:
                files_by_outcome[_take_back(root, last, row)].append(str(row["file"]))
        retry_while_open(lambda: last.rename(last.with_name(f"{last.name}-undone")))
    return {name: sorted(set(files)) for name, files in files_by_outcome.items()}


def _take_back(root: Path, folder: Path, row: Mapping[str, Any]) -> str:
    """Take back one file; return which list of `undo` it belongs to."""
    try:
        file = _inside(root, row["file"])
        old = None if row["old"] is None else _inside(folder / "old", row["old"]).read_bytes()
        now = file.read_bytes() if file.exists() else None
        if now != old and (now is None or sha256_bytes(now) != row["sha256"]):
            return "edited"
        if old is None:
            file.unlink(missing_ok=True)
            return "removed"
    except OSError as error:
        raise disk_error(file, error) from error
    write_atomic(file, old)
    return "restored"


def _inside(folder: Path, name: str) -> Path:
    """Return a file of `folder`; a record that came with a dataset may name any other."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"a record of captions in {folder} names {name!r}", fix="remove it")
    return path


@contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """Make the hidden folder and hold its lock."""
    parent = root / FOLDER
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # Some releases of filelock take "access denied" for a lock that is held: first see whether one may write.
        (parent / ".lock").touch()
    except OSError as error:
        raise disk_error(parent, error) from error
    busy = MachineError(
        f"{root} is being captioned by another process", fix="wait for it, or stop it first"
    )
    with locked(parent / ".lock", within_s=0, busy=busy):
        yield parent
    with suppress(OSError):  # a folder that holds no record is of no use
        if [path.name for path in parent.iterdir()] == [".lock"]:
            (parent / ".lock").unlink()
            parent.rmdir()


def _calls(parent: Path) -> dict[int, Path]:
    """Return the folders of all calls by number."""
    matches = {path: _NUMBERED.fullmatch(path.name) for path in parent.iterdir()}
    return {int(match[1]): path for path, match in matches.items() if match}


def _last_call(parent: Path) -> Path | None:
    """Return the folder of the last call that wrote captions and was not undone.

    A call that died before its first caption leaves a record without files.
    """
    for _, path in sorted(_calls(parent).items(), reverse=True):
        wrote = any("file" in row for row in read_jsonl(path / JOURNAL))
        if wrote and not path.name.endswith("-undone"):
            return path
    return None
