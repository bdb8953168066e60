"""What the interface remembers of each dataset folder, in `<runs>/.gui/datasets/`.

Inputs: the folders that somebody opened, drafts, runs. Outputs: how a folder is looked at (the
trigger word to look for, the size it would be trained at), and the folders used lately.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.files import (
    disk_error,
    json_bytes,
    read_json_object,
    user_path,
    write_atomic,
)

from .. import drafts
from ..command_lines import recorded_dataset
from ..drafts import Draft
from ..uploads import FOLDER as UPLOADS
from ..workplace import Workplace
from .journal import dataset_key

MAX_RECENT = 12
MASKED_BY = ("none", "files", "alpha")
_WORDS_SET = 100  # Undo of an older step leaves the word as it is
_NO_DRAFT = "0" * 12
_TRIGGER, MASKS = "data.trigger", "data.masks"


@dataclass(frozen=True, kw_only=True)
class WordSet:
    """The step of the journal that set the trigger word, and what it took the place of: Undo takes the word too."""

    step: str
    word: str
    noted_before: str | None
    drafted_before: str | None


@dataclass(frozen=True, kw_only=True)
class Notes:
    """How a folder is looked at; None leaves it to the draft that is about the folder."""

    folder: str
    name: str = ""
    """What somebody calls it; empty for the name of the folder."""
    opened_s: float = 0.0
    trigger: str | None = None
    resolution: str | None = None
    words_set: tuple[WordSet, ...] = ()
    """The newest last."""
    masks: str = ""
    """What was said last of its masks, a value of the setting; empty for nothing. Each new draft about it begins so."""


def read(work: Workplace, root: Path) -> Notes:
    """Return what is remembered of a folder, else nothing but its name."""
    return _read(_file(work, root)) or Notes(folder=str(root))


def save(work: Workplace, notes: Notes) -> None:
    """Write it; raises MachineError."""
    file = _file(work, Path(notes.folder))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error
    write_atomic(file, json_bytes(asdict(notes)), durable=False)


def opened(work: Workplace, root: Path) -> Notes:
    """Return what is remembered of a folder, with the time noted; raises MachineError."""
    notes = replace(read(work, root), folder=str(root), opened_s=time.time())
    save(work, notes)
    return notes


def draft_for(work: Workplace, root: Path) -> Draft:
    """Return the newest draft about this folder that is not started, else an unsaved one."""
    unsaved = with_masks(work, Draft(id=_NO_DRAFT, dataset=str(root)), root)
    return next(_drafts_about(work, root), unsaved)


def use_trigger(work: Workplace, root: Path, word: str, *, step: str = "") -> None:
    """Remember the trigger word that all captions of a folder have; the newest draft about it trains with it.

    `step` is the one of the journal that wrote it into captions.
    """
    noted, before = read(work, root), draft_for(work, root).settings.get(_TRIGGER)
    made = WordSet(
        step=step,
        word=word,
        noted_before=noted.trigger,
        drafted_before=before if isinstance(before, str) else None,
    )
    words = (*noted.words_set, made)[-_WORDS_SET:]
    _with_trigger(work, root, replace(noted, words_set=words), noted=word, drafted=word)


def follow_trigger(work: Workplace, root: Path, *, step: str, back: bool) -> None:
    """Take the trigger word back with the step that set it, or set it again with that step; other steps do nothing."""
    noted = read(work, root)
    made = next((each for each in noted.words_set if each.step == step), None)
    if made is None or (back and noted.trigger != made.word):
        return  # another word was chosen since
    if back:
        _with_trigger(work, root, noted, noted=made.noted_before, drafted=made.drafted_before)
    else:
        _with_trigger(work, root, noted, noted=made.word, drafted=made.word)


def _with_trigger(
    work: Workplace, root: Path, notes: Notes, *, noted: str | None, drafted: str | None
) -> None:
    save(work, replace(notes, folder=str(root), trigger=noted))
    with drafts.changing(work):
        draft = draft_for(work, root)
        if draft.id == _NO_DRAFT:  # a later one takes it from here
            return
        changed = (
            draft.without_setting(_TRIGGER)
            if drafted is None
            else draft.with_setting(_TRIGGER, drafted)
        )
        drafts.save(work, changed)


def use_masks(work: Workplace, root: Path) -> None:
    """Have the drafts about a folder train with its masks, those that are begun later too."""
    note_masks(work, root, "files")
    with drafts.changing(work):
        for draft in _drafts_about(work, root):
            if draft.settings.get(MASKS, "none") == "none":
                drafts.save(work, draft.with_setting(MASKS, "files"))


def drop_masks(work: Workplace, root: Path) -> None:
    """Leave masks out of the drafts about a folder, which has none any more."""
    if read(work, root).masks == "files":
        note_masks(work, root, "")
    with drafts.changing(work):
        for draft in _drafts_about(work, root):
            if draft.settings.get(MASKS) == "files":
                drafts.save(work, draft.without_setting(MASKS))


def note_masks(work: Workplace, root: Path, said: str) -> None:
    """Remember what was said last of the masks of a folder, a value of the setting, empty for nothing."""
    noted = read(work, root)
    if noted.masks != said:
        save(work, replace(noted, folder=str(root), masks=said))


def with_masks(work: Workplace, draft: Draft, root: Path) -> Draft:
    """Return a draft about a folder that says nothing of its masks as somebody said it of the folder."""
    said = read(work, root).masks
    return draft if not said or MASKS in draft.settings else draft.with_setting(MASKS, said)


def recent(work: Workplace) -> list[str]:
    """Return the folders used lately that are still there and may be named, the newest first."""
    found: dict[str, None] = {}
    for name in _used(work):
        try:
            found.setdefault(str(work.folder(name)))
        except LoraTrainError:
            continue
        if len(found) >= MAX_RECENT:
            break
    return list(found)


def _used(work: Workplace) -> Iterator[str]:
    notes = (_read(file) for file in (work.own / "datasets").glob("*.json"))
    known = [note for note in notes if note is not None]
    yield from (n.folder for n in sorted(known, key=lambda n: n.opened_s, reverse=True))
    yield from (draft.dataset for draft in _drafts(work) if draft.dataset)
    yield from (str(folder) for folder in sorted((work.own / UPLOADS).glob("[!.]*")))
    records = sorted(work.runs.glob("[!.]*/run.json"), key=_changed_ns, reverse=True)
    for record in records[:MAX_RECENT]:
        folder = recorded_dataset(record.parent)
        if folder is not None and folder.is_dir():  # a slider has words in place of images
            yield str(folder)


def _drafts_about(work: Workplace, root: Path) -> Iterator[Draft]:
    """Yield the drafts about a folder that are not started, the newest first."""
    for draft in _drafts(work):
        if not draft.started_as and _same_folder(draft.dataset, root):
            yield draft


def _drafts(work: Workplace) -> Iterator[Draft]:
    files = sorted((work.own / "drafts").glob("*.json"), reverse=True)
    for file in files:
        try:
            yield drafts.read(work, file.stem)
        except RequestError:
            continue


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was removed meanwhile
        return 0


def _same_folder(text: str, root: Path) -> bool:
    try:
        return bool(text.strip()) and Path(user_path(text)).resolve() == root
    except (OSError, RuntimeError, ValueError):
        return False


def _file(work: Workplace, root: Path) -> Path:
    return work.own / "datasets" / f"{dataset_key(root)}.json"


def _read(file: Path) -> Notes | None:
    try:
        values = read_json_object(file)
    except RequestError:  # none, or damaged: it only says how to look at the folder
        return None
    match values:
        case {
            "folder": str(folder),
            "opened_s": int() | float() as opened_s,
            "trigger": str() | None as trigger,
            "resolution": str() | None as resolution,
        }:
            return Notes(
                folder=folder,
                name=str(values.get("name") or ""),  # notes of earlier versions have none
                opened_s=opened_s,
                trigger=trigger,
                resolution=resolution,
                words_set=tuple(_words_set(values)),
                masks=masks if (masks := values.get("masks")) in MASKED_BY else "",
            )
    return None


def _words_set(values: Mapping[str, Any]) -> Iterator[WordSet]:
    rows = values.get(
        "words_set", [values.get("word_set")]
    )  # notes of earlier versions have the last one
    for row in rows if isinstance(rows, list) else ():
        match row:
            case {
                "step": str() as step,
                "word": str() as word,
                "noted_before": str() | None as noted,
                "drafted_before": str() | None as drafted,
            }:
                yield WordSet(step=step, word=word, noted_before=noted, drafted_before=drafted)
