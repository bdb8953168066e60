"""Kohya's TOML files, of a dataset or a training, as settings: every key is set, explained or named.

Input: a file. Output: `Imported`. A training file that names a dataset file brings it along.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.config import build_config
from lora_trainer.errors import InputError, RequestError
from lora_trainer.importing.dataset import is_dataset, read_dataset
from lora_trainer.importing.findings import Findings, Imported
from lora_trainer.importing.options import DEFAULT
from lora_trainer.importing.training import read_length, read_training


def import_kohya(file: Path) -> Imported:
    """Read a file of kohya's trainers.

    Raises InputError for one that cannot be read, RequestError for what it says and cannot be done here.
    """
    data, found = _read(file), Findings()
    if is_dataset(data):
        read_dataset(data, found)
    else:
        read_training(data, found)
        _read_named_dataset(data, found, beside=file.parent)
    if "data.validation_fraction" not in found.values:
        found.set("data.validation_fraction", 0.0, DEFAULT)
    if not is_dataset(data):
        read_length(data, found, beside=file.parent)
    try:
        build_config(found.values)
    except RequestError as error:
        raise RequestError(
            f"{file} says what cannot be done here: {error.found}", fix=error.fix
        ) from None
    return found.done()


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}", fix="give a readable UTF-8 file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is no TOML: {error}", fix="correct that line") from None


def _read_named_dataset(data: Mapping[str, Any], found: Findings, *, beside: Path) -> None:
    """Add the dataset file that a training file names, if it is there."""
    options = [data, *(part for part in data.values() if isinstance(part, dict))]
    named = next((part["dataset_config"] for part in options if part.get("dataset_config")), None)
    if named is None:
        if any("dataset_config" in part for part in options):
            found.stays("dataset_config", "is not given")
        return
    file = beside / str(named)
    if file.is_file():
        read_dataset(_read(file), found)
        found.stays("dataset_config", f"{file.name} is read too")
    else:
        found.lacks("dataset_config", named, "no such file: import it by itself")
