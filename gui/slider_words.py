"""A slider from words: four fields of the page Train, and the file of them that the commands take.

Inputs: what somebody typed, or the file of a slider that was trained. Outputs: `<runs>/.gui/sliders/DIGEST/NAME.toml`.
The folder is named by the words, so a file never changes: a run that was started with it can be resumed, whatever
is typed later.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import disk_error, windows_name_problem, write_atomic
from lora_trainer.dataset.slider_file import Direction, read_sliders

from .workplace import Workplace

TARGET, MORE, LESS, KEEP = KEYS = ("target", "more", "less", "keep")
"""The entries of `Draft.slider`; `keep` has a prompt on each line."""
_FOLDER = "sliders"
_NAME_MAX_LENGTH = 60


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
    content = "\n".join(["[[sliders]]", *rows, f"keep = [{', '.join(map(_toml, keep))}]", ""])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    file = work.own / _FOLDER / digest / f"{name_of(words)}.toml"
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(file, error) from error
        write_atomic(file, content.encode())
    return file


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
