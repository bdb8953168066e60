"""A slider from words: four fields of the page Train, and the file of them that the commands take.

Inputs: what somebody typed, or the file of a slider that was trained. Outputs: `<runs>/.gui/sliders/DIGEST/NAME.toml`.
The folder is named by the words, so a file never changes: a run that was started with it can be resumed, whatever
is typed later.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import disk_error, windows_name_problem, write_atomic
from lora_trainer.dataset.slider_file import Direction, is_slider_file, read_sliders

from .drafts import IMAGES, SLIDER, Draft
from .workplace import Workplace

TARGET, MORE, LESS, KEEP = KEYS = ("target", "more", "less", "keep")
"""The entries of `Draft.slider`; `keep` has a prompt on each line."""
EXAMPLE = {
    TARGET: "a large circle on a white background",
    MORE: "a large red circle on a white background",
    LESS: "a large blue circle on a white background",
}
"""The words that made the strip which the page shows: docs/experiments/sliders.md."""
_FOLDER = "sliders"
_NAME_MAX_LENGTH = 60
_TABLE = "[[sliders]]"


def file_of(work: Workplace, words: Mapping[str, str]) -> Path:
    """Return the file of a slider's words, written; raises RequestError for words that say nothing, MachineError."""
    said = {key: words.get(key, "").strip() for key in (TARGET, MORE, LESS)}
    keep = [line.strip() for line in words.get(KEEP, "").splitlines() if line.strip()]
    if said[MORE] == said[LESS]:
        raise RequestError(
            "the slider says the same twice"
            if said[MORE]
            else "the slider says neither what is more nor what is less",
            fix="type two descriptions that differ in one property, or one and leave the other empty",
        )
    rows = [f"{key} = {_toml(text)}" for key, text in said.items()]
    content = "\n".join([_TABLE, *rows, f"keep = [{', '.join(map(_toml, keep))}]", ""])
    return _kept(work, content.encode(), f"{name_of(words)}.toml")


def _kept(work: Workplace, content: bytes, name: str) -> Path:
    """Return the file of that content, written where it is not there; raises MachineError."""
    file = work.own / _FOLDER / hashlib.sha256(content).hexdigest()[:16] / name
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error
        write_atomic(file, content)
    return file


def brought(
    work: Workplace, draft: Draft, *, text: str, name: str, is_slider: bool
) -> Draft | None:
    """Return a draft with the slider of a file that somebody brought, of any trainer; None for a file of none.

    What the fields cannot say stays the file, kept beside the others. Raises InputError for one that is known to be
    a slider's (`is_slider`) and says none, MachineError.
    """
    suffix = Path(name).suffix.lower()
    content = text.encode("utf-8", errors="replace")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"slider{suffix}")
        if not is_slider_file(file):
            return None
        file.write_bytes(content)
        try:
            read_sliders(file)
        except InputError as error:
            if is_slider or _TABLE in text:
                found = error.found.replace(str(file), Path(name).name)
                raise InputError(found, fix=error.fix) from None
            return None
        words = words_of(file)
    if words is not None:
        return replace(draft, kind=SLIDER, slider=words, dataset="")
    return replace(draft, kind=IMAGES, dataset=str(_kept(work, content, f"slider{suffix}")))


def words_of(file: Path) -> dict[str, str] | None:
    """Return what the fields say of a slider's file; None where they cannot say all that it does."""
    try:
        words = read_sliders(file)
    except InputError:
        return None
    if len(words.directions) != 1 or words.directions[0].weight != 1:
        return None
    (only,) = words.directions
    return {TARGET: only.target, MORE: only.more, LESS: only.less, KEEP: "\n".join(only.keep)}


def name_of(words: Mapping[str, str]) -> str:
    """Return a name for the training of a slider: what there is more of, else less of."""
    text = next((words[key] for key in (MORE, LESS) if words.get(key, "").strip()), "")
    name = " ".join(re.sub(r"[^\w\s-]", " ", text).split())[:_NAME_MAX_LENGTH].strip(" -")
    return "slider" if not name or windows_name_problem(name) else name


def read(file: Path) -> Iterable[Direction]:
    """Return the directions of a slider's file; raises InputError."""
    return read_sliders(file).directions


def _toml(text: str) -> str:
    """Return a text as TOML writes it, which is as JSON does but for one sign."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
