"""Names for weight files that are no base model of a supported family, by their tensors' names and shapes.

The rows are in `signatures.toml`, which says how a row's marks are written. Torch-free.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.facts import Header

FILE = Path(__file__).with_suffix(".toml")

# The longest first: "model." also starts "model.diffusion_model.".
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.")
_MARK = re.compile(r"(!?)(.+?)(?:\[(\d)\]=(\d+))?")


def other_model(header: Header, *, family: str, file_name: str) -> str | None:
    """Return which model without a text-to-image family of ours a file is; `family` is the one it resembles."""
    tensors = _unprefixed(header)
    model_names = (
        model
        for model, base, pattern in _tables()["named_models"]
        if base == family and re.search(pattern, file_name.lower())
    )
    return _first(tensors, "other_models") or next(model_names, None)


def lone_part(header: Header) -> str | None:
    """Return "a VAE" and the like for a file of one part of a model, None for another file."""
    return _first(header, "lone_parts")


def text_encoder(header: Header) -> tuple[str, str, int] | None:
    """Return name, kind and width of the text encoder that a file holds, None where it holds none.

    The width is 0 where the table names no tensor of that length.
    """
    for name, marks, kind, width_ending in _tables()["text_encoders"]:
        if _fits(header, marks):
            shapes = [header[key].shape for key in header if key.endswith(width_ending or "?")]
            return name, kind, next((shape[0] for shape in shapes if shape), 0)
    return None


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tables


def _unprefixed(header: Header) -> Header:
    for prefix in PREFIXES:
        # One stray tensor ("model.x" beside a network without prefix) makes no prefix.
        if sum(name.startswith(prefix) for name in header) > len(header) // 10:
            return {name.removeprefix(prefix): info for name, info in header.items()}
    return header


def _first(tensors: Header, table: str) -> str | None:
    return next((model for model, marks in _tables()[table] if _fits(tensors, marks)), None)


def _fits(tensors: Header, marks: str) -> bool:
    return all(_has(tensors, *mark) for mark in _parsed(marks))


def _has(
    tensors: Header, absent: bool, name: str, pattern: re.Pattern[str] | None, axis: int, size: int
) -> bool:
    if pattern is None:
        infos = [tensors[name]] if name in tensors else []
    else:
        infos = [info for key, info in tensors.items() if pattern.match(key)]
    if size:
        infos = [info for info in infos if len(info.shape) > axis and info.shape[axis] == size]
    return bool(infos) != absent


@cache
def _parsed(marks: str) -> tuple[tuple[bool, str, re.Pattern[str] | None, int, int], ...]:
    parsed = []
    for mark in marks.format(**_tables()["abbreviations"]).split():
        match = _MARK.fullmatch(mark)
        assert match is not None
        absent, name, axis, size = match.groups()
        pattern = re.compile(translate(name)) if "*" in name else None
        parsed.append((bool(absent), name, pattern, int(axis or 0), int(size or 0)))
    return tuple(parsed)
