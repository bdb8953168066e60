"""What a file is: the family of an adapter by module names, widths and metadata, any weight file by its tensors.

The rules are in signatures.toml, and in `files` and `adapters` of each family.toml. Names of modules are compared
with `_` for `.`, which makes kohya's, diffusers' and ComfyUI's spelling equal. Some families that this program
cannot train are recognised too. Torch-free; the input is a file's header.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.base.layout import Header
from lora_trainer.families.base.tables import family_names, family_table, head

UNKNOWN = "unknown"
LORA = "a LoRA"
# Keys of metadata by which trainers name the base; A1111 lists files under the first.
STATED = ("ss_base_model_version", "modelspec.architecture", "base_model", "model_type")


def adapter_family(widths: Mapping[str, int], *, metadata: Mapping[str, str]) -> str:
    """Return the family of an adapter, `unknown` where names, widths and metadata leave it open.

    `widths` are the numbers of inputs of the modules, 0 where they are not known. Tensors weigh more than metadata.
    """
    metadata_family = stated_version(metadata)
    for names, pattern, *width in _module_rows():
        fitting = re.compile(_in_full(pattern)).search
        if any(
            fitting(name.replace(".", "_")) and width in ([], [inputs], [inputs > 0])
            for name, inputs in widths.items()
        ):
            candidates: list[str] = names.split()
            is_candidate = metadata_family in candidates
            return metadata_family if metadata_family and is_candidate else candidates[0]
    return metadata_family or UNKNOWN


def stated_version(metadata: Mapping[str, str], keys: Iterable[str] = STATED) -> str | None:
    """Return the family named in any trainer's metadata keys, None where no key names a known family."""
    starts = {name: family_table(name)["adapters"]["version"] for name in family_names()}
    texts = (metadata.get(key, "").lower().replace("_", "-") for key in keys)
    return next(
        (name for text in texts for name, start in starts.items() if re.match(start, text)), None
    )


@cache
def _module_rows() -> Sequence[Sequence[Any]]:
    """Return the rows (families, pattern, width) by which adapters are told apart, the first to ask first."""
    shared = signature_tables()["adapters"]

    def own(key: str) -> list[Sequence[Any]]:
        rows = ((name, family_table(name)["adapters"].get(key, ())) for name in family_names())
        return [(name, *row) for name, patterns in rows for row in patterns]

    return [
        *(*own("modules"), *shared["others"]),
        *(*own("modules_by_width"), *shared["others_by_width"]),
        *shared["several"],
        *(*own("text_modules"), *shared["last"]),
    ]


def a1111_version(family: str) -> str | None:
    """Return A1111's and Forge's name of a family's base models, None where they have none."""
    name: str | None = (
        family_table(family)["adapters"].get("a1111") if family in family_names() else None
    )
    return name


def _in_full(text: str) -> str:
    """Return marks or a pattern with the table's abbreviations written out."""
    return text.format(**signature_tables()["abbreviations"])


# ---- weight files, by the marks of signatures.toml, which says how they are written

# The longest first: "model." also starts "model.diffusion_model.".
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.")
_MARK = re.compile(r"(!?)(.+?)(?:\[(\d)\]=(\d+))?")


def other_model(header: Header, *, family: str, file_name: str) -> str | None:
    """Return which model a file is that is not one of our text-to-image bases; `family` is the one it resembles."""
    if any(mark in name for name in header for mark in signature_tables()["lora"]):
        return LORA
    tensors = _unprefixed(header)
    titles = [head(name)["name"] for name in family_names()]
    for model, marks in signature_tables()["other_models"]:
        # A row of a model that has become a family since is passed over.
        if fits(tensors, marks) and not any(title.startswith(model) for title in titles):
            return str(model)
    relatives = family_table(family)["files"].get("relatives", ()) if family else ()
    return next((model for model, mark in relatives if re.search(mark, file_name.lower())), None)


def text_encoder_in(header: Header) -> tuple[str, str, int] | None:
    """Return name, kind and width of the text encoder that a file holds, None where it holds none.

    The width is 0 where the table names no tensor of that length.
    """
    for name, marks, kind, width_ending in _text_encoder_rows():
        if fits(header, marks):
            shapes = [header[key].shape for key in header if key.endswith(width_ending or "?")]
            return name, kind, next((shape[0] for shape in shapes if shape), 0)
    return None


def _text_encoder_rows() -> Iterator[Sequence[str]]:
    """Yield the rows of text encoders that families bring, then those of signatures.toml."""
    for family in family_names():
        yield from family_table(family)["files"].get("text_encoders", ())
    yield from signature_tables()["text_encoders"]


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
    return all(_has(tensors, mark) for mark in _in_full(marks).split())


def _has(tensors: Header, mark: str) -> bool:
    match = _MARK.fullmatch(mark)
    assert match is not None
    absent, name, axis, size = match.groups()
    names: Iterable[str] = fnmatch.filter(tensors, name) if "*" in name else {name} & tensors.keys()
    shapes = [tensors[each].shape for each in names]
    if size:
        shapes = [shape for shape in shapes if shape[int(axis) : int(axis) + 1] == (int(size),)]
    return bool(shapes) != bool(absent)
