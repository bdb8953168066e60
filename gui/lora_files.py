"""The adapter files in the run folders and those that were brought, and what their headers and runs tell about them.

Input: the workplace. Outputs: frozen values; no markup. A file is named "RUN/FILE", and such a name
leads to a file only if the listing of the runs, or of what was brought, has it. Headers are read and checked, no
tensor is: hundreds of files are listed at once.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.event_kinds import Validation, event_of_row
from lora_trainer.common.files import disk_error, write_atomic
from lora_trainer.common.records import of_json
from lora_trainer.common.wording import one_line, public_source
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.families.base.tables import family_names, family_table, head
from lora_trainer.lora_file.base_layers import recognise
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.key_formats import key_format
from lora_trainer.lora_file.metadata import steps_trained
from lora_trainer.lora_file.read import read_contents
from lora_trainer.reporting.run_record import RunRecord, read
from lora_trainer.reporting.status import read_status

from . import brought, runs
from .brought import SUFFIX
from .clock import day_text, moment_text
from .lora_names import BestPicture, name_now, read_names, write_names
from .run_best import read_best, recommended, standing
from .workplace import Workplace

PREVIEW_SUFFIX = ".preview.png"
BEST_PICTURE_SUFFIX = ".best.png"
_NAME_MAX_LENGTH = 100
_ROLLING = re.compile(r"(?P<name>.+)-step(?P<step>\d{8})\.safetensors")
_THUMBNAIL = re.compile(r"data:image/(?:jpeg|png|webp);base64,[A-Za-z0-9+/]+={0,2}")
_MAX_HEADERS = 512
_AFTER_ALL_STEPS = 2**62
Stamp = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """An adapter file of a run folder.

    `trained` says that the run's training wrote it, not a tool, after `step` steps; `last` is its result.
    `best` is the one that somebody marked as such, `earlier` are the names it had, `note` what was noted, `picture` how
    the picture was drawn that somebody marked as its best.
    """

    run: str
    path: Path
    trained: bool
    best: bool
    last: bool
    step: int | None
    size_bytes: int
    changed_ns: int
    earlier: tuple[str, ...] = ()
    note: str = ""
    picture: BestPicture | None = None

    @property
    def ref(self) -> str:
        """The name under which pages and jobs know it."""
        return f"{self.run}/{self.path.name}"

    @property
    def is_brought(self) -> bool:
        """Whether somebody brought it, so that no run knows of it."""
        return self.run == brought.FOLDER

    @property
    def label(self) -> str:
        """Its name in a list of many, with its run."""
        return self.path.stem if self.is_brought else self.ref.removesuffix(SUFFIX)

    def was(self, ref: object) -> bool:
        """Return whether a job began with this file, under whatever name it had then."""
        return ref in (self.ref, *(f"{self.run}/{name}" for name in self.earlier))


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of itself; empty texts and None where it says nothing.

    `problem` is why it cannot be read; `thumbnail` is a data URL of a picture.
    """

    metadata: Mapping[str, str]
    family: str = ""
    format: str = ""
    rank: int | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        return self.metadata.get("modelspec.title", "")

    @property
    def trigger(self) -> str:
        return self.metadata.get("modelspec.trigger_phrase", "")

    @property
    def base(self) -> str:
        """The model it was made for, as its own entries name it, else its family."""
        named = self.own_base or self.metadata.get("ss_sd_model_name", "")
        return (named if named != "None" else "") or self.family_name

    @property
    def own_base(self) -> str:
        """The base that its own settings name, an empty text where it has none or they leave it open."""
        try:
            stated = json.loads(self.metadata.get("lora_train.settings", "{}"))["base.model"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        return str(stated) if stated not in (None, "None", "auto") else ""

    @property
    def family_name(self) -> str:
        """The family of its base as it is written in texts, an empty text where the file does not tell it."""
        return str(head(self.family)["name"]) if self.family in family_names() else ""

    @property
    def finds_base(self) -> bool:
        """Whether its own settings name a base that is found without its folder: a miniature or one of the Hub."""
        return self.own_base in MINIATURES or "/" in self.own_base

    @property
    def usual_base(self) -> str:
        """The base to draw with where its own settings name none that is found: that of its family."""
        if self.finds_base or self.family not in family_names():
            return ""
        releases = family_table(self.family)["releases"]
        return str(min(releases, key=lambda each: each.get("offered", math.inf))["ids"][0])

    @property
    def is_try_out(self) -> bool:
        """Whether it was made on the built-in base, which no other program has."""
        return self.metadata.get("ss_sd_model_name") in MINIATURES

    @property
    def steps(self) -> int | None:
        return steps_trained(self.metadata)

    @property
    def thumbnail(self) -> str:
        text = self.metadata.get("modelspec.thumbnail", "")
        return text if _THUMBNAIL.fullmatch(text) else ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One LoRA of the library: the file to take, the others of its training, from the last one on.

    `is_best`: somebody, or its loss on the held-out images, found it best. `validation` is how much better it is than
    the base on the `held_out` images, empty where that is not more than they differ by themselves; `is_sure`: they
    are enough, and it is much.
    """

    file: LoraFile
    header: Header
    saves: tuple[LoraFile, ...] = ()
    validation: str = ""
    held_out: int = 0
    is_sure: bool = False
    is_best: bool = False
    training: bool = False


def entries(work: Workplace) -> tuple[Entry, ...]:
    """Return all LoRAs of the runs folder and those that were brought, the newest first."""
    found = [
        entry
        for run in runs.find_runs(work.runs)
        for entry in _entries_of(work.runs / run.name, run)
    ]
    folder = brought.folder_of(work)
    if not folder.is_symlink():
        found += [Entry(file=file, header=read_header(file)) for file in _files(folder)]
    return tuple(sorted(found, key=lambda entry: -entry.file.changed_ns))


def find(work: Workplace, ref: str) -> LoraFile:
    """Return the file of that name; raises RequestError for one that no run has."""
    run, _, name = ref.partition("/")
    folder = folder_of(work, run)
    # A bookmark or another tab has the name from before it was renamed.
    wanted = name_now(folder, read_names(folder), name)
    for file in _files(folder):
        if file.path.name == wanted:
            return file
    if run == brought.FOLDER:
        raise RequestError(f"no added file is named {name!r}", fix="choose one from the list")
    raise RequestError(f"the run {run} has no file {name!r}", fix="choose one from the list")


def folder_of(work: Workplace, run: str) -> Path:
    """Return the folder of a run, or that of what was brought; raises RequestError for any other name."""
    folder = brought.folder_of(work)
    if run == brought.FOLDER and folder.is_dir() and not folder.is_symlink():
        return folder
    return runs.run_folder(work.runs, run)


def read_header(file: LoraFile) -> Header:
    """Return what the file says of itself, with the reason for one that cannot be read."""
    return _header(file.path, (file.changed_ns, file.size_bytes))


def step_of(file: LoraFile) -> int | None:
    """Return after how many steps a training wrote a file, as its name or its header says; None for neither."""
    return file.step or read_header(file).steps


def recorded_base(file: LoraFile) -> str:
    """Return where the base of a file is on this machine, an empty text where its run does not say.

    A header names a base without its folder; a tool's result is for the run's base if the names agree.
    """
    source = _record(file.path.parent).base.source
    if not source:
        return ""
    same = file.trained or read_header(file).base == public_source(source)
    return source if same else ""


def matching(found: tuple[Entry, ...], text: str, base: str) -> tuple[Entry, ...]:
    """Return those that have every word of `text` in a name or a text, of a base if one is given."""
    words = text.casefold().split()
    return tuple(
        entry
        for entry in found
        if base in ("", entry.header.base) and all(word in _searched(entry) for word in words)
    )


def rename(work: Workplace, ref: str, name: str) -> LoraFile:
    """Give a LoRA and what lies beside it another name; return it as it is then.

    Raises RequestError for a name that is taken or impossible, or while its run trains, MachineError.
    """
    file = find(work, ref)
    folder = file.path.parent
    if read_status(folder).state == "running":
        raise RequestError(f"{file.run} is being trained", fix="wait for it, or stop it")
    target = folder / f"{file_stem(name)}{SUFFIX}"
    if target == file.path:
        return file
    if target.exists():
        raise RequestError(f"there is a file {target.name} already", fix="type another name")
    names = read_names(folder).renamed(file.path.name, target.name)
    try:
        for before, after in zip(beside(file.path), beside(target), strict=True):
            if before.is_file() and not after.exists():
                before.rename(after)
        file.path.rename(target)
    except OSError as error:
        raise disk_error(target, error) from error
    write_names(folder, names)
    return find(work, f"{file.run}/{target.name}")


def take_note(work: Workplace, ref: str, text: str) -> LoraFile:
    """Keep a note on a LoRA, an empty text for none; raises RequestError, MachineError."""
    file = find(work, ref)
    if text.strip() != file.note:
        folder = file.path.parent
        write_names(folder, read_names(folder).noted(file.path.name, text.strip()))
    return find(work, ref)


def mark_picture(work: Workplace, ref: str, image: Path, drawn: BestPicture) -> LoraFile:
    """Keep a copy of an image beside a LoRA as its best picture; raises RequestError, MachineError."""
    file = find(work, ref)
    try:
        content = image.read_bytes()
    except OSError:
        raise RequestError("this picture is not there any more", fix="draw it again") from None
    write_atomic(best_picture(file.path), content)
    _picture(file, drawn)
    return find(work, ref)


def unmark_picture(work: Workplace, ref: str) -> LoraFile:
    """Have no best picture of a LoRA; raises RequestError, MachineError."""
    file = find(work, ref)
    _picture(file, None)
    try:
        best_picture(file.path).unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(file.path.parent, error) from error
    return find(work, ref)


def _picture(file: LoraFile, drawn: BestPicture | None) -> None:
    folder = file.path.parent
    write_names(folder, read_names(folder).pictured(file.path.name, drawn))


def best_picture(path: Path) -> Path:
    """Return where the best picture of a LoRA file lies, whether it is there or not."""
    return path.with_name(f"{path.stem}{BEST_PICTURE_SUFFIX}")


def beside(path: Path) -> tuple[Path, ...]:
    """Return where what belongs to a LoRA file lies, whether it is there or not: its pictures, new tokens."""
    preview = path.with_name(f"{path.stem}{PREVIEW_SUFFIX}")
    return preview, best_picture(path), embedding_path(path)


def file_stem(text: str) -> str:
    """Return the name of a file that somebody typed, without its ending; raises RequestError."""
    stem = text.strip().removesuffix(SUFFIX)
    if not stem or not stem.isprintable() or stem[0] in ".-" or set(stem) & set('/\\:*?"<>|'):
        raise RequestError(
            f"{stem[:100]!r} cannot be the name of a file",
            fix="use letters, digits, spaces, ._-, no . or - in front",
        )
    if len(stem) > _NAME_MAX_LENGTH:
        raise RequestError(
            f"the name has {len(stem)} letters", fix=f"use at most {_NAME_MAX_LENGTH}"
        )
    return stem


def unused(path: Path) -> Path:
    """Return `path`, or the first of NAME-002, NAME-003, ... that is not there."""
    number = 1
    while True:
        tried = path if number == 1 else path.with_name(f"{path.stem}-{number:03d}{path.suffix}")
        if not tried.exists():
            return tried
        number += 1


def _searched(entry: Entry) -> str:
    header = entry.header
    told = [header.metadata.get(f"modelspec.{key}", "") for key in ("tags", "description")]
    told += [header.title, header.trigger, header.base, header.family]
    return " ".join((entry.file.ref, entry.file.note, *told)).casefold()


def _entries_of(folder: Path, run: runs.RunEntry) -> Iterator[Entry]:
    """Yield what the training of a run wrote as one, then each file that tools made of it."""
    files = tuple(_files(folder))
    if (result := _result_among(files, folder)) is not None:
        yield replace(result, training=run.status.state == "running")
    for file in files:
        if not file.trained:
            yield Entry(file=file, header=read_header(file))


def day_of(file: LoraFile) -> str:
    """Return the day a file was written, in this machine's time zone."""
    return day_text(file.changed_ns / 1e9)


def minute_of(file: LoraFile) -> str:
    """Return the day and the time of day that a file was written, which tells two of one day apart."""
    return moment_text(file.changed_ns / 1e9)


def result_of(folder: Path) -> Entry | None:
    """Return what the training of a run wrote, the file to take before the others; None for nothing yet."""
    return _result_among(tuple(_files(folder)), folder)


def _result_among(files: Sequence[LoraFile], folder: Path) -> Entry | None:
    trained = [file for file in files if file.trained]
    if not trained:
        return None
    losses = dict(_validations(folder))
    base_loss = losses.pop(0, math.nan)
    losses[_AFTER_ALL_STEPS] = losses[max(losses)] if losses else math.nan
    trained.sort(key=lambda file: -(file.step or _AFTER_ALL_STEPS))
    by_step = {file.step or _AFTER_ALL_STEPS: file.path.name for file in trained if not file.best}
    take = recommended(by_step, losses, read_best(folder))
    file = next((file for file in trained if take and file.path.name == take.file), trained[0])
    good = standing(take, losses, base_loss=base_loss)
    held_out = len(_record(folder).dataset.held_out)
    return Entry(
        file=file,
        header=read_header(file),
        saves=tuple(other for other in trained if other is not file),
        validation="" if good is None or not good.is_clear else good.said,
        held_out=held_out,
        is_sure=good is not None and good.is_sure(held_out),
        is_best=take is not None and take.is_found,
    )


def _files(folder: Path) -> Iterator[LoraFile]:
    """Yield the adapter files of a run folder; a link may lead anywhere and is none."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # it was removed meanwhile
        return
    name = _record(folder).name or folder.name
    best, names, status = read_best(folder), read_names(folder), read_status(folder)
    for path in paths:
        if path.suffix != SUFFIX or path.name.startswith(".") or path.is_symlink():
            continue
        try:
            stat = path.stat()
        except OSError:  # pruned meanwhile
            continue
        if path.is_file():
            earlier = names.earlier(path.name)
            is_best = best is not None and path.name == best.file
            rolling = next(filter(None, map(_ROLLING.fullmatch, (path.name, *earlier))), None)
            is_result = f"{name}{SUFFIX}" in (path.name, *earlier)
            own = is_best or is_result or (rolling is not None and rolling["name"] == name)
            step = int(rolling["step"]) if rolling and own else None
            if is_result and status.state == "finished":
                step = status.step
            yield LoraFile(
                run=folder.name,
                path=path,
                trained=own,
                best=is_best,
                last=is_result,
                step=best.step if best is not None and is_best else step,
                size_bytes=stat.st_size,
                changed_ns=stat.st_mtime_ns,
                earlier=earlier,
                note=names.notes.get(path.name, ""),
                picture=names.pictures.get(path.name),
            )


@lru_cache(maxsize=_MAX_HEADERS)
def _header(path: Path, stamp: Stamp) -> Header:
    """Read a header once per version of the file, which `stamp` tells apart."""
    try:
        contents = read_contents(path)
    except InputError as error:
        return Header(metadata={}, problem=one_line(error.found.removeprefix(f"{path} ")))
    ranks = Counter(rank for part in contents.parts.values() for rank in part.ranks)
    return Header(
        metadata=contents.metadata,
        family=recognise(contents.parts, contents.metadata).family,
        format=key_format(contents.parts),
        rank=ranks.most_common(1)[0][0] if ranks else None,
        problem="" if contents.parts else "holds no LoRA",
    )


def _record(folder: Path) -> RunRecord:
    try:
        return read(folder)
    except RequestError:
        return of_json(RunRecord, {})


def _validations(folder: Path) -> Mapping[int, float]:
    """Return the losses of a run on its held-out images by step, the base's at 0."""
    file = folder / "events.jsonl"
    try:
        stat = file.stat()
    except OSError:
        return {}
    return _losses_in(file, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=_MAX_HEADERS)
def _losses_in(file: Path, stamp: Stamp) -> Mapping[int, float]:
    """Read only the lines of validations, which are few: a list reads the events of all runs."""
    losses: dict[int, float] = {}
    try:
        lines = [line for line in file.read_bytes().splitlines() if b'"validation"' in line]
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        event = event_of_row(row) if isinstance(row, dict) else None
        if isinstance(event, Validation) and math.isfinite(event.loss):
            losses[event.step] = event.loss
    return losses
