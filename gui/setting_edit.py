"""Changes to the settings of a draft: one field, all of them as a settings file, back to the preset.

Inputs: a draft, and what was typed. Outputs: the draft with it, or RequestError with the words of the
command line. What a draft keeps beside its settings (base model, name) is a setting here like others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import (
    SettingInfo,
    all_settings,
    build_config,
    check_keys,
    flatten,
    refuse_removed,
    without_retired,
)
from lora_trainer.config.layers import read_settings_text

from .command_lines import run_name
from .drafts import Draft
from .fence import fenced
from .setting_text import value_of
from .workplace import Workplace

BASE, NAME, FOLDER = "base.model", "output.name", "output.folder"
_AUTO = ("", "auto")
_PASTED = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Edited:
    """A draft after a change, and what of the change was left out, in a sentence."""

    draft: Draft
    note: str = ""


def given(draft: Draft) -> dict[str, Any]:
    """Return what the draft sets over its preset, by `section.name`."""
    own = {BASE: draft.base, NAME: draft.name}
    return {
        **{key: value for key, value in own.items() if value.strip() not in _AUTO},
        **draft.settings,
    }


def setting(key: str) -> SettingInfo:
    """Return the declaration of a setting; raises RequestError with the nearest name."""
    check_keys({key: None})
    return next(info for info in all_settings() if info.key == key)


def changed(draft: Draft, *, key: str, text: str) -> Draft:
    """Return the draft with the value that was typed for a setting; raises RequestError."""
    return _with(draft, {**given(draft), key: value_of(setting(key), text)})


def without(draft: Draft, *, key: str) -> Draft:
    """Return the draft with a setting left to the preset; raises RequestError."""
    setting(key)
    return _with(draft, {name: value for name, value in given(draft).items() if name != key})


def replaced(draft: Draft, *, text: str, name: str = _PASTED) -> Edited:
    """Return the draft with the settings of a settings file and no others.

    Raises RequestError: bad syntax with line and column, a wrong setting with its name.
    """
    if not text.strip():
        return Edited(draft=_with(draft, {}))
    try:
        read = read_settings_text(text, name=_PASTED, toml=name.lower().endswith(".toml"))
    except RequestError as error:
        raise RequestError(_in_words(error.found), fix=error.fix) from None
    values = {key: value for key, value in read.values.items() if key != FOLDER}
    edited = _with(draft, values)
    note = ""
    if FOLDER in read.values:
        note = f"{FOLDER} was left out: runs of this interface go into its own folder."
    return Edited(draft=edited, note=note)


def check_paths(draft: Draft, work: Workplace) -> None:
    """Raise InputError for a file or folder outside of what this server may name."""
    fenced(given(draft), work)


def as_json(values: Mapping[str, Any]) -> str:
    """Return settings as the text of a settings file, which `--config` reads."""
    return json.dumps(dict(values), ensure_ascii=False, indent=2) + "\n"


def _with(draft: Draft, values: Mapping[str, Any]) -> Draft:
    """Return the draft with these settings and no others; raises RequestError."""
    if draft.started_as:
        raise RequestError("this training is started already", fix="begin a new one on page Train")
    if FOLDER in values:
        raise RequestError(
            f"{FOLDER} is the runs folder of this interface",
            fix="start the interface with --runs FOLDER for another one",
        )
    refuse_removed(values)
    values = without_retired(values)
    _refuse_halves(as_json(values))
    # What the model makes of a value is kept: 123 is a word where a word is wanted.
    flat = flatten(build_config(values))
    settings = {key: flat[key] for key in values}
    own = {key: str(settings.pop(key, "")) for key in (BASE, NAME)}
    base, name = ("" if text.strip() in _AUTO else text for text in own.values())
    return replace(draft, base=base, name=run_name(name), settings=settings)


def _refuse_halves(text: str) -> None:
    """Raise RequestError for half a character, which no file and no command line can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"half a character stands after {text[max(0, error.start - 20) : error.start]!r}",
            fix="type it again",
        ) from None


def _in_words(found: str) -> str:
    """Return an error about pasted text without the name of a file, which it is not from."""
    named = re.sub(rf"{re.escape(_PASTED)}:(\d+):(\d+)", r"line \1, column \2", found)
    return named.replace(f"{_PASTED}: ", "")
