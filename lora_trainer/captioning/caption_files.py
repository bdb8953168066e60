"""Which images of a dataset get a caption, and where it is written.

Input is a dataset folder, which is only listed here. A caption from a file, from `metadata.jsonl` or
from a folder's name counts as one, and is left alone unless it is asked to be replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError, did_you_mean
from lora_trainer.common.events import shown
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import is_json, read_caption_file, split_name
from lora_trainer.dataset.listing import ImageFile, list_dataset

EXTENSION = ".txt"


@dataclass(frozen=True, kw_only=True)
class Target:
    """An image to be captioned, the file for its caption, and that file's bytes now (None: no file)."""

    picture: Path
    name: str
    file: Path
    before: bytes | None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An image that cannot be given a caption, and why."""

    name: str
    what: str
    fix: str


@dataclass(kw_only=True)
class Chosen:
    """Images to caption by name, names of those that have one by its source, and images that cannot be captioned."""

    targets: list[Target] = field(default_factory=list)
    captioned: dict[str, str] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
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
        file = _file_for(picture, dataset, output)
        owner = owners.setdefault(file, picture.name)
        before = content_of(file)
        if owner != picture.name:
            what = f"would share the caption file of {owner}"
            chosen.refused.append(
                Refusal(name=picture.name, what=what, fix="rename one of the two")
            )
        elif file.is_symlink():
            what = f"has {file.name}, which is a link to elsewhere"
            fix = "put a file in its place, or use --output"
            chosen.refused.append(Refusal(name=picture.name, what=what, fix=fix))
        elif not overwrite and (source := _caption_source(picture, file, before)):
            chosen.captioned[picture.name] = source
        else:
            target = Target(picture=picture.path, name=picture.name, file=file, before=before)
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
                f"--images {shown(name)} is no image of {shown(str(dataset))}."
                f"{did_you_mean(name, by_name)}",
                fix="name it as it is named inside the folder",
            )
        selected_names.add(match.name)
    yield from (picture for picture in by_name.values() if picture.name in selected_names)


def _file_for(picture: ImageFile, dataset: Path, output: Path | None) -> Path:
    """Return the file that training reads for an image: the one it has, else NAME.txt beside it."""
    sidecar = picture.sidecar
    if output is None and sidecar is not None and not is_json(sidecar.name):
        return sidecar
    beside = picture.path.with_name(split_name(picture.path.name)[0] + EXTENSION)
    return beside if output is None else output / beside.relative_to(dataset)


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
