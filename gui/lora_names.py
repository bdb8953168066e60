"""The names and notes that somebody gave the LoRAs of a run, and their best pictures, in `library.json` of its folder.

Inputs: a run folder, file names in it. Outputs: under which name a file that a training wrote lies now, the note on a
file, and how its best picture was drawn. Only the
pages read it; a trainer that goes on writes under its own names as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.reporting.history import mapping

FILE = "library.json"
MAX_NOTE_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True)
class BestPicture:
    """How the picture was drawn that somebody marked as the best of a LoRA; it lies beside the file."""

    prompt: str
    seed: int
    strength: float


_PICTURE = TypeAdapter(BestPicture)


@dataclass(frozen=True, kw_only=True)
class LoraNames:
    """`now` are the names that files have now by each name they had; `notes` and `pictures` are by the name of now."""

    now: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, BestPicture] = field(default_factory=dict)

    def earlier(self, name: str) -> tuple[str, ...]:
        """Return the names that a file had before, the first one first."""
        return tuple(old for old, new in self.now.items() if new == name)

    def renamed(self, old: str, new: str) -> LoraNames:
        """Return the names after a file got another one."""
        now = {first: new if last == old else last for first, last in self.now.items()} | {old: new}
        now.pop(new, None)  # back to a name it had
        notes = {new if name == old else name: text for name, text in self.notes.items()}
        pictures = {new if name == old else name: best for name, best in self.pictures.items()}
        return LoraNames(now=now, notes=notes, pictures=pictures)

    def pictured(self, name: str, best: BestPicture | None) -> LoraNames:
        """Return the names with another best picture of a file, None for none."""
        pictures = {other: kept for other, kept in self.pictures.items() if other != name}
        return replace(self, pictures=pictures | ({} if best is None else {name: best}))

    def noted(self, name: str, text: str) -> LoraNames:
        """Return the notes with another one; raises RequestError for one that is too long."""
        if len(text) > MAX_NOTE_CHARACTERS:
            raise RequestError(
                f"the note has {len(text):,} characters", fix=f"use at most {MAX_NOTE_CHARACTERS:,}"
            )
        notes = {other: note for other, note in self.notes.items() if other != name}
        return replace(self, notes=notes | {name: text} if text.strip() else notes)


def read_names(folder: Path) -> LoraNames:
    """Return the names and notes of a run folder; none where nothing was said, or it is damaged."""
    try:
        record = read_json_object(folder / FILE)
    except RequestError:
        return LoraNames()
    now, notes = (
        {name: str(value) for name, value in mapping(record, key).items()}
        for key in ("now", "notes")
    )
    pictures = {}
    for name, value in mapping(record, "pictures").items():
        with suppress(ValidationError):  # changed by hand
            pictures[name] = _PICTURE.validate_python(value)
    return LoraNames(now=now, notes=notes, pictures=pictures)


def write_names(folder: Path, names: LoraNames) -> None:
    """Write them; raises MachineError."""
    write_atomic(folder / FILE, json_bytes(asdict(names)))


def name_now(folder: Path, names: LoraNames, first: str) -> str:
    """Return the name of a file that a training wrote as `first`."""
    return first if (folder / first).is_file() else names.now.get(first, first)
