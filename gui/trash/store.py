"""What was deleted in the pages: moved into `<runs>/.gui/trash/ID/`, and back as long as nobody empties it.

Inputs: a run, a LoRA, or a dataset that a browser sent. Outputs: record.json, which says where each file
was, and the files. Files are renamed only: within one disk nothing is copied, and nothing is half there. A
record comes before its files leave, so that an end in between loses nothing.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import (
    disk_error,
    json_bytes,
    locked,
    read_json_object,
    retry_while_open,
    write_atomic,
)
from lora_trainer.dataset.images import IMAGE_EXTENSIONS
from lora_trainer.queue import commands
from lora_trainer.reporting.history import mapping, number
from lora_trainer.reporting.run_record import read
from lora_trainer.reporting.sample_files import (
    PREVIEWS,
    SAMPLES,
    last_samples,
    newest_preview,
    own_samples,
)
from lora_trainer.reporting.status import read_status

from .. import lora_files, runs
from ..datasets.open_dataset import open_dataset
from ..uploads import is_uploaded
from ..workplace import Workplace

FOLDER, RECORD = "trash", "record.json"
KINDS: tuple[str, ...] = ("run", "lora", "dataset")
_LOCK_WITHIN_S = 10.0
_STEP = re.compile(r"-step(?P<step>\d{8})\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class Thrown:
    """Something in the trash; `places` are where its files were, relative to the runs folder, by their name here."""

    id: str
    kind: str
    name: str
    others: int = 0
    """How many images there are beside the one that a heap of photos is called after."""
    thrown_s: float
    places: Mapping[str, str]


def throw_away(work: Workplace, *, kind: str, ref: str) -> Thrown:
    """Move a run, a LoRA (RUN/FILE) or an uploaded dataset into the trash.

    Raises RequestError for what is not there or in use, MachineError when the disk refuses.
    """
    with _alone(work):
        meant = _meant(work, kind, ref)
        thrown = Thrown(
            id=f"{time.time_ns():x}",
            kind=kind,
            name=meant.name,
            others=meant.others,
            thrown_s=time.time(),
            places={
                f"{place}-{path.name}": path.relative_to(work.runs).as_posix()
                for place, path in enumerate(meant.paths)
            },
        )
        folder = _folder(work) / thrown.id
        record = {
            "kind": kind,
            "name": thrown.name,
            "others": thrown.others,
            "at_s": thrown.thrown_s,
            "places": thrown.places,
        }
        try:
            folder.mkdir(parents=True)
            write_atomic(folder / RECORD, json_bytes(record))
            for here, place in thrown.places.items():
                _rename(work.runs / place, folder / here)
        except OSError as error:
            raise disk_error(folder, error) from error
    return thrown


def put_back(work: Workplace, id: str) -> Thrown:
    """Move something back to where it was; raises RequestError where another thing is by now."""
    with _alone(work):
        thrown = next((each for each in contents(work) if each.id == id), None)
        if thrown is None:
            raise RequestError("this is not in the trash any more", fix="reload the page")
        folder = _folder(work) / id
        gone = {here: place for here, place in thrown.places.items() if (folder / here).exists()}
        taken = next((place for place in gone.values() if (work.runs / place).exists()), None)
        if taken is not None:
            raise RequestError(
                f"there is another {Path(taken).name} by now",
                fix="rename or delete that one first",
            )
        try:
            for here, place in gone.items():
                (work.runs / place).parent.mkdir(parents=True, exist_ok=True)
                _rename(folder / here, work.runs / place)
            shutil.rmtree(folder)
        except OSError as error:
            raise disk_error(folder, error) from error
    return thrown


def contents(work: Workplace) -> list[Thrown]:
    """Return what is in the trash, the newest first; damaged records are left out."""
    listed = []
    for folder in sorted(_folder(work).glob("[!.]*"), reverse=True):
        try:
            record = read_json_object(folder / RECORD)
        except RequestError:
            continue
        places = {str(here): str(place) for here, place in mapping(record, "places").items()}
        inside = all(_is_plain(here, place) for here, place in places.items())
        if inside and places:
            listed.append(
                Thrown(
                    id=folder.name,
                    kind=str(record.get("kind")),
                    name=str(record.get("name")),
                    others=others if isinstance(others := record.get("others"), int) else 0,
                    thrown_s=number(record, "at_s"),
                    places=places,
                )
            )
    return listed


def holding(work: Workplace, place: str) -> Thrown | None:
    """Return what was deleted last of a place, a path below the runs folder, None for nothing of it.

    A file is also in what was deleted with the folder around it.
    """
    wanted = PurePosixPath(place)
    for thrown in contents(work):
        if any(wanted.is_relative_to(was) for was in thrown.places.values()):
            return thrown
    return None


def empty(work: Workplace) -> None:
    """Delete what is in the trash for good; raises MachineError."""
    with _alone(work):
        for folder in _folder(work).glob("[!.]*"):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise disk_error(folder, error) from error


def size_bytes(work: Workplace, thrown: Thrown | None = None) -> int:
    """Return what the trash takes of the disk, or one thing in it."""
    folder = _folder(work) / (thrown.id if thrown else "")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def picture(work: Workplace, thrown: Thrown) -> Path | None:
    """Return the picture by which somebody knows what was deleted; None without any.

    Of a training its last sample, else a preview of it, else what the base drew; of a LoRA the one beside it, else what
    its training drew until then; of images the first of them.
    """
    here = [_folder(work) / thrown.id / name for name in thrown.places]
    beside = [path for path in here if path.is_file() and path.suffix.lower() in IMAGE_EXTENSIONS]
    if beside:
        return beside[0]
    match thrown.kind:
        case "run":
            samples, previewed = here[0] / SAMPLES, newest_preview(here[0] / PREVIEWS)
            found = own_samples(samples) or ([previewed] if previewed else last_samples(samples))
        case "lora":
            (place, *_rest) = thrown.places.values()
            step = _STEP.search(place)
            run = (work.runs / place).parent
            found = own_samples(run / SAMPLES, up_to=int(step["step"]) if step else None)
        case _:
            named = sorted(path for path in here[0].glob("*") if _is_picture(path))
            found = named or sorted(path for path in here[0].rglob("*") if _is_picture(path))
    return next(iter(found), None)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_EXTENSIONS and path.is_file() and path.name[0] != "."


@dataclass(frozen=True, kw_only=True)
class _Meant:
    """What is to go, by the name that its page has for it."""

    name: str
    others: int = 0
    paths: Sequence[Path]


def _meant(work: Workplace, kind: str, ref: str) -> _Meant:
    """Return what is to go; raises RequestError."""
    match kind:
        case "run":
            folder = runs.run_folder(work.runs, ref)
            _refuse_busy(work, folder)
            return _Meant(name=ref, paths=[folder])
        case "lora":
            file = lora_files.find(work, ref)
            if read_status(file.path.parent).state == "running":
                raise RequestError(f"{file.run} is being trained", fix="wait for it, or stop it")
            beside = (path for path in lora_files.beside(file.path) if path.is_file())
            return _Meant(name=file.path.stem, paths=[file.path, *beside])
        case "dataset":
            folder = work.folder(ref)
            if not is_uploaded(work, folder):
                raise RequestError(
                    f"{folder.name} is a folder of your own", fix="delete it in your file manager"
                )
            for run in runs.find_runs(work.runs):
                if run.status.state == "running" and _uses(work.runs / run.name, folder):
                    raise RequestError(f"{run.name} is trained on it", fix="wait for it")
            opened = open_dataset(work, folder, counters={})
            return _Meant(name=opened.name, others=opened.others, paths=[folder])
    raise RequestError(f"{kind!r} is nothing to delete", fix="reload the page")


def _refuse_busy(work: Workplace, run: Path) -> None:
    if read_status(run).state == "running":
        raise RequestError(f"{run.name} is being trained", fix="stop it first")
    target = str(run.resolve())
    for item in commands.items(work.runs):
        words = {item.run, *item.argv}
        if not item.has_ended and words & {run.name, target, f"--resume-from={target}"}:
            raise RequestError(f"{run.name} is in the queue", fix="remove it there first")


def _uses(run: Path, dataset: Path) -> bool:
    try:
        words = read(run).command
    except RequestError:
        return False
    return str(dataset) in words


def _is_plain(here: str, place: str) -> bool:
    parts = Path(place).parts
    return Path(here).name == here and ".." not in parts and not Path(place).is_absolute()


def _rename(source: Path, target: Path) -> None:
    retry_while_open(lambda: source.rename(target))


def _folder(work: Workplace) -> Path:
    return work.own / FOLDER


def _alone(work: Workplace) -> Any:
    busy = MachineError("another page moves something into the trash", fix="try again")
    work.own.mkdir(parents=True, exist_ok=True)
    return locked(work.own / f"{FOLDER}.lock", within_s=_LOCK_WITHIN_S, busy=busy)
