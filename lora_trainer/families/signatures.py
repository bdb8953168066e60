"""What a weight file is, by its tensors: marks of signatures.toml, which says how they are written. Torch-free."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.facts import Header

# The longest first: "model." also starts "model.diffusion_model.".
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.")
_MARK = re.compile(r"(!?)(.+?)(?:\[(\d)\]=(\d+))?")


def other_model(header: Header, *, family: str, file_name: str) -> str | None:
    """Return which model without a text-to-image family of ours a file is; `family` is the one it resembles."""
    tensors = _unprefixed(header)
    model_names = (
        model
        for model, base, pattern in signature_tables()["named_models"]
        if base == family and re.search(pattern, file_name.lower())
    )
    return first_fit(tensors, "other_models") or next(model_names, None)


def text_encoder_in(header: Header) -> tuple[str, str, int] | None:
    """Return name, kind and width of the text encoder that a file holds, None where it holds none.

    The width is 0 where the table names no tensor of that length.
    """
    for name, marks, kind, width_ending in signature_tables()["text_encoders"]:
        if fits(header, marks):
            shapes = [header[key].shape for key in header if key.endswith(width_ending or "?")]
            return name, kind, next((shape[0] for shape in shapes if shape), 0)
    return None


@cache
def signature_tables() -> Mapping[str, Any]:
    """Return the contents of signatures.toml."""
    tables: Mapping[str, Any] = tomllib.loads(
        Path(__file__).with_name("signatures.toml").read_text(encoding="utf-8")
    )
    return tables


def _unprefixed(header: Header) -> Header:
    for prefix in PREFIXES:
        # One stray tensor ("model.x" beside a network without prefix) makes no prefix.
        if sum(name.startswith(prefix) for name in header) > len(header) // 10:
            return {name.removeprefix(prefix): info for name, info in header.items()}
    return header


def first_fit(tensors: Header, table: str) -> str | None:
    """Return the model of the first row of a table whose marks fit, None where none does."""
    return next((model for model, marks in signature_tables()[table] if fits(tensors, marks)), None)


def fits(tensors: Header, marks: str) -> bool:
    """Return whether a file with these tensors has all marks, as signatures.toml writes them."""
    return all(
        _has(tensors, mark) for mark in marks.format(**signature_tables()["abbreviations"]).split()
    )


def _has(tensors: Header, mark: str) -> bool:
    match = _MARK.fullmatch(mark)
    assert match is not None
    absent, name, axis, size = match.groups()
    names: Iterable[str] = fnmatch.filter(tensors, name) if "*" in name else {name} & tensors.keys()
    shapes = [tensors[each].shape for each in names]
    if size:
        shapes = [shape for shape in shapes if shape[int(axis) : int(axis) + 1] == (int(size),)]
    return bool(shapes) != bool(absent)
